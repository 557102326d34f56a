"""Training in a notebook, in a real kernel."""

import os
import re
import signal
import threading
import time

import nbformat
import pytest
from jupyter_client.manager import start_new_kernel
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


CELLS = (
    """\
import torch
from torch import nn
import headwater as hw

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
model = hw.compile(model, hw.backend("CSX", tier="disk", disk="disk", num_slabs=2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

def train(steps):
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 16)).square().mean()
        loss.backward()
        optimizer.step()
        if step == 2:
            open("busy", "w").close()
    return loss.item()""",
    "print(train(3))",
    "print(train(10**9))",
)
"""Cells that define a model, train it, and train it for so long that the user interrupts the cell."""


@pytest.mark.real_start
def test_cells_that_are_interrupted_can_train_again_and_be_run_again(tmp_path):
    busy = tmp_path / "busy"
    manager, client = start_new_kernel(cwd=str(tmp_path))
    try:

        def run(index):
            """Return what the cell prints, and the name of its error or None.

            This waits for the idle kernel, not for its reply: ipykernel 7.4 once failed to send a reply.
            """
            message_id, printed, error = client.execute(CELLS[index]), [], None
            while True:
                message = client.get_iopub_msg(timeout=240)
                content = message["content"]
                if message["parent_header"].get("msg_id") != message_id:
                    continue
                if message["msg_type"] == "stream":
                    printed.append(content["text"])
                elif message["msg_type"] == "error":
                    error = content["ename"]
                elif content.get("execution_state") == "idle":
                    return "".join(printed), error

        def interrupt_when_busy():
            while not busy.exists():
                time.sleep(0.05)
            os.kill(manager.provisioner.pid, signal.SIGINT)

        def last_loss():
            printed, error = run(1)
            assert error is None
            return float(printed.split()[-1])  # on a busy machine, notices of the plan come before the loss

        assert run(0)[1] is None
        first = last_loss()
        busy.unlink()
        waiting = threading.Thread(target=interrupt_when_busy)
        waiting.start()
        assert run(2)[1] == "KeyboardInterrupt"
        waiting.join()
        after_interrupt = last_loss()
        assert run(0)[1] is None
        again = last_loss()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert after_interrupt < first == again
