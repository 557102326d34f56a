"""The disk tier holds a few stages in memory, never the whole model."""

import json

import pytest
from process_memory import outputs_of

pytestmark = pytest.mark.real_start

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from torch import nn
from harness import Setting, make_engine, regression
from process_memory import peak_bytes, reset_peak
from headwater.core.stage import ParamSpec
from headwater.optim.spec import OptimizerSpec

torch.set_num_threads(1)
WIDTH, DEPTH = 1024, 16  # 4 MiB of weights a stage; 192 MiB with the state of Adam

def initial(spec: ParamSpec) -> torch.Tensor:
    return torch.randn(spec.shape) * 0.01

def make_model():
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))

def measure(folder, tier, gradient_tier, micro_batches):
    optimizer = OptimizerSpec("AdamW", {"lr": 1e-3})
    small = regression(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), 4, 8, optimizer=optimizer)
    with make_engine(small, Setting("disk"), folder) as engine:  # torch loads libraries at first use
        engine.train_step(small.batches(0), small.update(0))
    before = reset_peak()
    job = regression(make_model, 8, WIDTH, optimizer=optimizer, micro_batches=micro_batches)
    setting = Setting(tier, 2, gradient_tier=gradient_tier)
    with make_engine(job, setting, folder, initial=initial) as engine:
        for step in range(3):
            engine.train_step(job.batches(step), job.update(step))
    print(json.dumps({"rise": peak_bytes() - before, "state": 12 * DEPTH * WIDTH * WIDTH}), flush=True)

for case in json.loads(sys.argv[2]):  # a process each: this one has imported torch, and started no thread
    child = os.fork()
    if child == 0:
        measure(Path(sys.argv[1]), *case)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{case} failed")
"""

MIB = 2**20
CASES = [("disk", "memory", 1), ("disk", "disk", 1), ("disk", "disk", 3), ("memory", "memory", 1)]
"""Tier, tier of the gradients, number of micro-batches."""


@pytest.fixture(scope="module")
def rises(tmp_path_factory) -> dict[tuple[str, str, int], tuple[int, int]]:
    """Return by case the rise of the memory peak of its process, and the bytes of weights and state."""
    folder = tmp_path_factory.mktemp("store")
    results = outputs_of(SCRIPT, folder, json.dumps(CASES), mmap_threshold=1 << 16)
    return {case: (found["rise"], found["state"]) for case, found in zip(CASES, results, strict=True)}


def test_disk_tier_holds_slabs_staging_and_gradients(rises):
    used, state = rises["disk", "memory", 1]
    slabs, staging, gradients, workspaces = 2 * 4, 4 * 8, 64, 24
    assert used < (slabs + staging + gradients + workspaces) * MIB < state


def test_disk_tier_with_gradients_on_disk_holds_no_more_than_a_few_stages(rises):
    used, state = rises["disk", "disk", 1]
    slabs, staging, gradients, workspaces = 2 * 4, 4 * 8, 3 * 4, 24
    assert used < (slabs + staging + gradients + workspaces) * MIB < state / 2


def test_gradients_on_disk_are_summed_there_stage_by_stage(rises):
    used, state = rises["disk", "disk", 3]
    slabs, staging, gradients, workspaces = 2 * 4, 4 * 8, 4 * 4, 24
    assert used < (slabs + staging + gradients + workspaces) * MIB < state / 2


def test_the_measured_peak_includes_the_state_in_the_memory_tier(rises):
    used, state = rises["memory", "memory", 1]
    assert used > state
