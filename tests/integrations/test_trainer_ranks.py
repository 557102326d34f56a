"""Trainer, Lightning and a loop of accelerate on two ranks equal DistributedDataParallel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import assert_same_tensors

SCRIPT = Path(__file__).with_name("trainer_ranks_script.py")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2")
PATIENCE_S = 300

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")


def run(kind, folder, launcher=()):
    """Run the script; return its exit code, and what it printed."""
    (folder / kind).mkdir()
    done = subprocess.run(
        [sys.executable, *launcher, SCRIPT, kind, folder / kind],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the results of plain PyTorch on two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    code, printed = run("plain", folder, TORCHRUN)
    assert code == 0, printed
    return folder


@pytest.mark.parametrize(
    ("kind", "launcher"), [("resident", TORCHRUN), ("disk", ())], ids=["torchrun", "python"]
)
def test_trainers_on_two_ranks_equal_distributed_data_parallel(kind, launcher, folder):
    code, printed = run(kind, folder, launcher)
    assert code == 0, printed
    plain, ours = folder / "plain", folder / kind
    assert json.loads((ours / "seen.json").read_text()) == json.loads((plain / "seen.json").read_text())
    for mine, theirs in zip(*(torch.load(place / "weights.pt") for place in (ours, plain)), strict=True):
        assert_same_tensors(mine, theirs)
    files = [sorted(path.name for path in place.glob("checkpoint-6/*")) for place in (ours, plain)]
    assert files[0] == files[1] and "rng_state_1.pth" in files[0]


def test_a_backend_with_fewer_ranks_than_processes_is_refused(tmp_path):
    code, printed = run("none", tmp_path, TORCHRUN)
    assert code != 0
    assert "the Trainer has 2 processes, but the backend 1 rank" in printed
    assert "write headwater.backend(..., num_csx=2)" in printed
