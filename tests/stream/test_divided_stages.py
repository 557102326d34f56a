"""A block that is divided into several stages computes the bits of plain PyTorch with every plan."""

import dataclasses

import pytest
from gpt_job import gpt_job, plain_gpt
from harness import (
    FP32,
    Job,
    Setting,
    assert_equal,
    check,
    make_engine,
    make_plan,
    regression,
    train_streamed,
)
from rank_training import Net, loss_of, masters, plan_of, tokens, train
from tests.rank_processes import run_ranks
from torch import nn
from torch.nn import functional as F

from headwater.plan.types import Activations

BLOCK = 199_936  # bytes of a block of `gpt_job` in fp32
HALF, QUARTER = BLOCK // 2, BLOCK // 4
POLICIES = ("keep", "recompute", "offload")
SETTINGS = [
    *(Setting("disk", 2, policy, "disk", most_stage_bytes=QUARTER) for policy in POLICIES),
    *(Setting("memory", 2, policy, most_stage_bytes=HALF) for policy in POLICIES),
    Setting("disk", 99, "recompute", most_stage_bytes=HALF),
    Setting(in_place=True, activations="recompute", most_stage_bytes=QUARTER),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_divided_blocks_equal_plain_pytorch(setting, tmp_path):
    with make_engine(gpt_job(), setting, tmp_path) as engine:
        assert "transformer.h.3.mlp.c_fc" in [stage.name for stage in engine.plan.trace.stages]
    assert_equal(train_streamed(gpt_job(), setting, tmp_path, steps=2), plain_gpt(2))


def test_micro_batches_of_divided_blocks_equal_plain_pytorch(tmp_path):
    setting = Setting("disk", 2, "recompute", "disk", most_stage_bytes=QUARTER)
    streamed = train_streamed(gpt_job(micro_batches=2), setting, tmp_path, steps=2)
    assert_equal(streamed, plain_gpt(2, micro_batches=2))


def test_recomputed_blocks_whose_inputs_are_offloaded_equal_plain_pytorch(tmp_path, monkeypatch):
    def from_host(plan):
        blocks = plan.trace.members
        policies = [
            Activations.RECOMPUTE_FROM_HOST if stage in blocks else policy
            for stage, policy in enumerate(plan.activations)
        ]
        return dataclasses.replace(plan, activations=tuple(policies))

    made = make_plan
    monkeypatch.setattr("harness.make_plan", lambda *args: from_host(made(*args)))
    setting = Setting("disk", 2, "recompute", most_stage_bytes=QUARTER)
    assert_equal(train_streamed(gpt_job(), setting, tmp_path, steps=2), plain_gpt(2))


class Reading(nn.Module):
    """A block whose forward reads weights of its parts, of another block and of another layer directly."""

    def __init__(self, other):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.gate, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.gate.weight = self.up.weight
        self.mix, self.fixed = nn.Linear(32, 32), nn.Linear(32, 32).requires_grad_(False)
        self.other = [other]
        self.down.register_forward_hook(lambda module, args, out: out * module.weight.mean())
        self.down.register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))

    def forward(self, x):
        hidden = self.norm(x)
        hidden = self.down(F.gelu(self.up(hidden)) * self.gate(hidden))
        return x + F.linear(self.fixed(hidden), self.mix.weight, self.mix.bias) @ self.other[0].weight


class ReadingBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.middle = nn.Linear(32, 32)
        self.layers = nn.ModuleList(Reading(self.middle) for _ in range(3))
        self.layers[2].mix.weight = self.layers[1].fixed.weight

    def forward(self, x):
        x = self.middle(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("policy", POLICIES)
def test_divided_blocks_that_read_weights_of_other_modules_equal_plain_pytorch(policy, tmp_path):
    job = regression(ReadingBlocks, 4, 16)
    setting = Setting("disk", 4, policy, most_stage_bytes=5000)
    plan = make_plan(job, job.model(), setting, tmp_path)
    read_in_first = [plan.trace.stages[stage].name for stage in plan.trace.sites["layers.0"]]
    assert read_in_first == ["middle", "layers.0.mix", "layers.0"]
    check(job, setting, tmp_path, steps=2)


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_ranks_with_divided_blocks_equal_ranks_with_whole_ones(policy, tmp_path):
    part = Job(Net, lambda step, index: tokens(step, index).chunk(2)[0], loss_of)
    setting = Setting("disk", 4, policy, most_stage_bytes=2500)
    plan = make_plan(part, part.model(), setting, tmp_path)
    assert "blocks.0.up" in [stage.name for stage in plan.trace.stages]
    wanted = run_ranks(lambda fabric: train(fabric, plan_of(FP32, 1), 1, read=masters))
    found = run_ranks(lambda fabric: train(fabric, plan, 1, read=masters))
    assert found[0][0] == found[1][0] == wanted[0][0]
    for name, value in wanted[0][1].items():
        assert (found[0][1][name] == value).all(), name
