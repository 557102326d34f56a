"""The plan counts the host memory that a checkpoint of the disk tier uses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.core.transfers import BUFFER_BYTES

pytestmark = pytest.mark.real_start

SCRIPT = """
import json, sys, threading
from pathlib import Path
import torch
from torch import nn
from harness import Setting, make_engine, regression
from headwater.optim.spec import OptimizerSpec
from headwater.plan.footprint import Footprint
from headwater.store.snapshot import Snapshot

torch.set_num_threads(1)
WIDTH, DEPTH = 2048, 4  # 16 MiB of weights a stage
folder = Path(sys.argv[1])

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

def make_model():
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))

def train(engine, job, step):
    writing = threading.Thread(target=Snapshot(engine.store, folder / str(step), step).run)
    writing.start()
    engine.train_step(job.batches(step), job.update(step))
    writing.join()

optimizer = OptimizerSpec("AdamW", {"lr": 1e-3})
small = regression(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), 4, 8, optimizer=optimizer)
with make_engine(small, Setting("disk"), folder / "tier") as engine:  # torch loads libraries at first use
    for step in range(3):
        train(engine, small, step)
job = regression(make_model, 8, WIDTH, optimizer=optimizer)
Path("/proc/self/clear_refs").write_text("5")  # reset the peak
before = status("VmRSS")
setting = Setting("disk", 2, gradient_tier="disk")
zeros = lambda spec: torch.zeros(()).expand(spec.shape)
with make_engine(job, setting, folder / "tier", initial=zeros) as engine:
    for step in range(4):
        train(engine, job, step)
    trained = status("VmHWM") - before
    parts = Footprint(engine.plan.trace, optimizer_state_bytes=8, base_bytes=0).memory(engine.plan).host
    at_rest = status("VmRSS")
    readers = [engine.store.parameters.read(stage) for stage in (0, 1)]  # like two threads that save
    pieces = [next(reader) for reader in readers]
    held = status("VmRSS") - at_rest
print(json.dumps({"trained": trained, "held": held, "parts": parts}))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path_factory.mktemp("snapshot"))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_training_with_checkpoints_stays_within_the_plan(measured):
    assert measured["trained"] <= sum(measured["parts"].values())


def test_saving_two_stages_at_once_uses_the_memory_in_the_plan(measured):
    counted = measured["parts"]["snapshot"] - BUFFER_BYTES  # these reads need no buffers for writes
    assert counted / 2 < measured["held"] <= counted
