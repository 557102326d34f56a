"""The examples run as a user runs them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """Keep files of examples out of the checkout and of the folder for temporary files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")


def run(name, *options):
    """Return the lines that an example prints."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def numbers(lines):
    """Return all numbers with a decimal point in lines."""
    return [float(number) for number in re.findall(r"-?\d+\.\d+", " ".join(lines))]


def test_every_example_is_in_the_table():
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}.py`" in page for name in SCRIPTS) and len(SCRIPTS) == 6
    assert all(f"`{name}.ipynb`" in page for name in NOTEBOOKS) and len(NOTEBOOKS) == 2


def test_streamed_loop_prints_the_losses_of_plain_pytorch():
    lines = run("own_loop")
    assert len(lines) == 10 and all(line.endswith(" equal") for line in lines)


def test_checkpoint_is_loaded_trained_on_disk_and_saved():
    *losses, saved, loads = run("larger_than_memory")
    values = [float(line.split()[1]) for line in losses]
    assert len(values) == 5 and values[-1] < values[0]
    assert "model.safetensors" in saved and loads == "loads: LlamaForCausalLM"


def test_trainer_of_transformers_trains():
    (line,) = [line for line in run("huggingface_trainer") if line.startswith("losses [")]
    assert len(numbers([line])) == 4


def test_lightning_trains():
    values = numbers([line for line in run("lightning_module") if line.startswith("losses")])
    assert len(values) == 12 and values[-1] < values[0]


def test_two_ranks_print_each_loss_once():
    assert len(numbers(run("two_ranks"))) == 6


def test_params_file_with_an_own_model_resumes():
    params = ("--params", str(EXAMPLES / "params_own_model.yaml"), "--mode", "train")
    run("params_own_model", *params, "--max_steps", "3")
    run("params_own_model", *params)
    steps = Path("runs/own_model/history.jsonl").read_text().count('"kind": "train"')
    assert steps == 6


@pytest.mark.real_start  # a kernel ends with all processes of its group
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_runs(name, tmp_path):
    shutil.copy(EXAMPLES / f"{name}.ipynb", tmp_path)
    notebook = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [each for cell in notebook.cells for each in cell.get("outputs", [])]
    assert outputs and not [each for each in outputs if each.output_type == "error"]
