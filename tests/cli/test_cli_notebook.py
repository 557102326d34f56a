"""A run in a notebook, in a real kernel: one bar that changes in place."""

import re

import nbformat
import pytest
from nbclient import NotebookClient


@pytest.mark.real_start
def test_a_run_in_a_notebook_has_a_bar_that_changes_in_place(params, tmp_path):
    source = f"from headwater.cli.main import main\nmain(['fit', {str(params)!r}])"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    client, updates = NotebookClient(notebook, timeout=240, kernel_name="python3"), []

    def note(message):
        if message["msg_type"] == "update_display_data":
            updates.append(message["content"]["data"]["text/plain"])

    process_message = client.process_message

    def noted(message, cell, cell_index):
        note(message)
        return process_message(message, cell, cell_index)

    client.process_message = noted
    client.execute(cwd=str(tmp_path))
    outputs = notebook.cells[0].outputs
    bars = [output.data for output in outputs if "<progress" in output.get("data", {}).get("text/html", "")]
    assert len(bars) == 1, outputs
    assert 'value="6" max="6"' in bars[0]["text/html"] and "loss" in bars[0]["text/html"]
    assert updates and updates[-1].startswith("6/6  loss")
    shown = " ".join(str(output.get("data", output.get("text", ""))) for output in outputs)
    assert not re.search(r"step \d/6", shown), "no line for each step"
    assert "validation loss" in shown
