"""Buffers in steps that fail, and weights on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headwater.core.errors import NonFiniteError, StreamError
from headwater.core.precision import Precision
from headwater.optim.spec import OptimizerSpec
from headwater.plan.trace import trace_step
from headwater.plan.types import Activations, Plan
from headwater.store.update import Update
from headwater.stream.buffers import Buffers
from headwater.stream.engine import Engine

CPU, META = torch.device("cpu"), torch.device("meta")


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x).square().mean()


def engine_of(model, x, *, loss_function=lambda model, x: model(x)):
    trace = trace_step(model, x, loss_function=loss_function)
    keep = (Activations.KEEP,) * len(trace.stages)
    plan = Plan(trace, Precision(), "cpu", "memory", False, 2, keep, len(x), 1, "memory")
    return Engine(model, plan, OptimizerSpec("SGD", {"lr": 0.1}), loss_function=loss_function)


@pytest.mark.parametrize("skip", [True, False])
def test_a_skipped_step_does_not_change_running_statistics(skip):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    model = Normed()
    with engine_of(model, x) as engine:
        engine.train_step([x], Update(0, {"lr": 0.1}))
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        bad = Update(1, {"lr": 0.1}, skip_non_finite=skip)
        if skip:
            assert not engine.train_step([x * float("nan")], bad).applied
        else:
            with pytest.raises(NonFiniteError):
                engine.train_step([x * float("nan")], bad)
        assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
        engine.train_step([x], Update(2, {"lr": 0.1}))
        assert not torch.equal(before["layers.1.running_mean"], model.layers[1].running_mean)


def test_reading_masters_does_not_block_other_threads():
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    with engine_of(Normed(), x) as engine:
        engine.train_step([x], Update(0, {"lr": 0.1}))
        losses = [engine.evaluate(x).item() for _ in engine.named_masters()]
    assert len(set(losses)) == 1


@pytest.mark.parametrize("what", ["weights", "buffer"])
def test_weights_and_buffers_on_the_meta_device_are_refused(what):
    x = torch.randn(16, 4)
    model = Normed()
    if what == "weights":
        model.to_empty(device="meta")
    else:
        model.layers[1].running_mean = model.layers[1].running_mean.to("meta")
    with pytest.raises(StreamError, match="meta device"):
        engine_of(model, x)


def test_an_engine_that_is_refused_leaves_all_weights_as_they_were():
    model = Normed()
    model.layers[2].to_empty(device="meta")
    before = model.layers[0].weight.detach().clone()
    with pytest.raises(StreamError, match=r"layers\.2"):
        engine_of(model, torch.randn(16, 4))
    assert type(model.layers[0].weight) is nn.Parameter and torch.equal(model.layers[0].weight, before)


class Scales:
    """The scales of a quantized weight, which have a method `to` that moves them in place."""

    def __init__(self):
        self.device = torch.device("cpu")

    def to(self, device):
        self.device = device


class Quantized(nn.Parameter):
    """A parameter whose class moves its scales together with its values."""

    def to(self, device):
        self.scales.to(device)
        return super().to(device)


def test_objects_that_a_class_of_parameters_moves_are_moved_with_the_buffers():
    model = nn.Linear(2, 2)
    model.weight = Quantized(torch.zeros(2, 2))
    model.weight.scales, model.weight.offset, model.weight.layer = Scales(), torch.zeros(2), nn.Linear(1, 1)
    model.bias.offset = torch.zeros(2)
    Buffers(model, META)
    assert model.weight.scales.device == model.weight.offset.device == META
    assert model.weight.device == model.bias.offset.device == model.weight.layer.weight.device == CPU
