"""Any `nn.Module` streams to the bits of plain PyTorch, in whatever way it uses its weights."""

import pytest
import torch
from harness import Setting, check
from odd_models import JOBS

# A module that counts its calls gives another result when its forward runs again: PyTorch's own
# checkpointing has the same limit.
SETTINGS = [
    Setting("memory", 2),
    Setting("disk", 3, "recompute", "disk"),
    Setting("disk", 2, "offload"),
    Setting("memory", 99, "recompute"),
    Setting(in_place=True),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", JOBS)
def test_odd_models(name, setting, tmp_path):
    check(JOBS[name](micro_batches=2), setting, tmp_path)


def test_layers_may_run_in_another_order_each_step(tmp_path):
    check(JOBS["random order"](), Setting("disk", 2), tmp_path, steps=20)


def test_running_statistics_move_once_when_the_forward_runs_twice(tmp_path):
    plain = check(JOBS["batch norm"](), Setting("memory", 2, "recompute"), tmp_path, steps=3)
    assert plain.buffers["0.1.num_batches_tracked"] == 3
    assert not torch.equal(plain.buffers["0.1.running_mean"], torch.zeros(3))
