"""The plan counts the host memory that a checkpoint of the disk tier uses."""

import pytest
from process_memory import outputs_of

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
from process_memory import peak_bytes, reset_peak, resident_bytes

torch.set_num_threads(1)
WIDTH, DEPTH = 2048, 4  # 16 MiB of weights a stage
folder = Path(sys.argv[1])

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
before = reset_peak()
setting = Setting("disk", 2, gradient_tier="disk")
zeros = lambda spec: torch.zeros(()).expand(spec.shape)
with make_engine(job, setting, folder / "tier", initial=zeros) as engine:
    for step in range(4):
        train(engine, job, step)
    trained = peak_bytes() - before
    parts = Footprint(engine.plan.trace, optimizer_state_bytes=8, base_bytes=0).memory(engine.plan).host
    at_rest = resident_bytes()
    readers = [engine.store.parameters.read(stage) for stage in (0, 1)]  # like two threads that save
    pieces = [next(reader) for reader in readers]
    held = resident_bytes() - at_rest
print(json.dumps({"trained": trained, "held": held, "parts": parts}))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    [found] = outputs_of(SCRIPT, tmp_path_factory.mktemp("snapshot"), mmap_threshold=1 << 16)
    return found


def test_training_with_checkpoints_stays_within_the_plan(measured):
    assert measured["trained"] <= sum(measured["parts"].values())


def test_saving_two_stages_at_once_uses_the_memory_in_the_plan(measured):
    counted = measured["parts"]["snapshot"] - BUFFER_BYTES  # these reads need no buffers for writes
    assert counted / 2 < measured["held"] <= counted
