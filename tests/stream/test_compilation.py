"""Compiled stages train like those that are not compiled."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from headwater.core.precision import Precision
from headwater.optim.spec import OptimizerSpec
from headwater.plan.trace import trace_step
from headwater.plan.types import Activations, Plan
from headwater.store.update import Update
from headwater.stream.engine import Engine
from headwater.stream.options import EngineOptions


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def losses(*, compiled: bool) -> list[float]:
    model, x = Model(), torch.linspace(-1, 1, 128).view(8, 16)
    trace = trace_step(model, x)
    keep = (Activations.KEEP,) * len(trace.stages)
    plan = Plan(trace, Precision(), "cpu", "memory", False, 2, keep, 8, 1, "memory")
    options = EngineOptions(compile_blocks=compiled)
    with Engine(model, plan, OptimizerSpec("SGD", {"lr": 0.1}), options=options) as engine:
        return [engine.train_step([x], Update(step, {"lr": 0.1})).loss for step in range(4)]


@pytest.mark.slow
def test_compiled_blocks_have_the_same_losses_with_two_slabs():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled = losses(compiled=True)
    assert compiled == pytest.approx(losses(compiled=False), rel=1e-6)
    # the input of the first of the four blocks needs no gradient, so that one is compiled apart
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
