"""Dry runs that skip equal stages have the same trace as dry runs of all stages."""

import pytest
import torch
from torch import nn

from headwater.config import load_params, shipped_params
from headwater.core.dry_run import costs_by_shapes
from headwater.plan import repeats
from headwater.plan.trace import trace_step
from headwater.trainer.planning import dry_runs
from headwater.trainer.zoo_job import zoo_trainable


@costs_by_shapes
class Layer(nn.Module):
    def __init__(self, width=8, shared=None, frozen=False):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.linear.requires_grad_(not frozen)

    def forward(self, x, bias=None, scale=1.0):
        y = self.linear(x).relu() * scale
        return x + y if bias is None else x + y + bias


class Stack(nn.Module):
    """Equal layers, called by `order`; `shared` is an input of all of them."""

    def __init__(self, num_layers=8, order=None, make=Layer, shared=False, scales=None):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(num_layers))
        self.order = order or range(num_layers)
        self.bias = nn.Parameter(torch.zeros(8)) if shared else None
        self.scales = scales

    def forward(self, x):
        bias = None if self.bias is None else self.bias * 2
        for place, layer in enumerate(self.order):
            x = self.layers[layer](x, bias, self.scales[place] if self.scales else 1.0)
        return x.sum()


@pytest.fixture
def skipped(monkeypatch):
    """The calls that were skipped."""
    calls, output = [], repeats.Call.output

    def noted(*args):
        calls.append(args)
        return output(*args)

    monkeypatch.setattr(repeats.Call, "output", noted)
    return calls


def traces(model, batch, monkeypatch):
    """Return the trace with skipped stages, and that of a dry run of all stages."""
    skipping = trace_step(model, batch)
    monkeypatch.setattr(repeats, "_equal_stages", lambda model, partition: [])
    return skipping, trace_step(model, batch)


@pytest.mark.parametrize(
    "model",
    [Stack(), Stack(shared=True), Stack(scales=[1.0, 2.0] * 4)],
    ids=["alone", "with a trained input that all share", "with two kinds of inputs"],
)
def test_trace_with_skipped_stages_equals_the_trace_of_all(model, skipped, monkeypatch):
    skipping, full = traces(model, torch.zeros(4, 8, requires_grad=True), monkeypatch)
    assert skipping == full
    assert 1 <= len(skipped) <= 3


def test_frozen_layers_below_the_first_trained_one_run(monkeypatch):
    model = Stack()
    for layer in model.layers[:6]:
        layer.requires_grad_(False)
    skipping, full = traces(model, torch.zeros(4, 8), monkeypatch)
    assert skipping == full


@pytest.mark.parametrize(
    "order",
    [
        [*range(8), 4],
        [*range(8), 1],
        [0, 0, *range(8)],
        [7, *range(7)],
        [*range(8), *range(8)],
        [*range(8), *range(7)],
    ],
)
def test_stages_that_are_used_twice_or_in_another_order(order, monkeypatch):
    skipping, full = traces(Stack(order=order), torch.zeros(4, 8, requires_grad=True), monkeypatch)
    assert skipping == full


def test_layers_of_different_widths_run():
    model = Stack()
    for layer in model.layers[1::2]:
        layer.linear = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    costs = trace_step(model, torch.zeros(4, 8, requires_grad=True)).costs
    assert costs[3].saved_bytes != costs[4].saved_bytes


def test_a_layer_of_another_class_runs(skipped):
    class Changed(Layer):
        pass

    trace_step(Stack(make=Changed), torch.zeros(4, 8))
    assert not skipped


def test_a_layer_with_a_hook_runs(skipped):
    model = Stack()
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: None)
    trace_step(model, torch.zeros(4, 8))
    assert not skipped


@pytest.mark.parametrize(
    ("params", "layers"),
    [
        ("gpt/tiny", {"num_hidden_layers": 6}),
        ("gemma2/tiny", {"num_hidden_layers": 9}),  # two kinds of masks
        ("mixtral/tiny", {"num_hidden_layers": 6}),
        ("bert/tiny", {"num_hidden_layers": 6}),
        ("t5/tiny", {"encoder_num_hidden_layers": 6, "decoder_num_hidden_layers": 6}),
        ("dit/tiny_mnist", {"num_hidden_layers": 6}),
        ("vit/tiny", {"num_hidden_layers": 6}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_family_has_the_trace_of_all_its_layers(params, layers, skipped, monkeypatch):
    overrides = [f"trainer.init.model.{name}={value}" for name, value in layers.items()]
    check_zoo(load_params(shipped_params()[params], overrides), skipped, monkeypatch)


def test_layers_that_are_called_several_times_also_without_gradients(skipped, tmp_path, monkeypatch):
    text = shipped_params()["dino/tiny"].read_text()
    (tmp_path / "dino.yaml").write_text(text.replace("num_hidden_layers: 2", "num_hidden_layers: 6"))
    check_zoo(load_params(tmp_path / "dino.yaml"), skipped, monkeypatch)


def check_zoo(config, skipped, monkeypatch):
    """Check that the dry run skips stages, with the trace of a dry run of all stages."""
    trainable = zoo_trainable(config.init)
    skipping = dry_runs(config.init, trainable)(2)
    assert skipped
    monkeypatch.setattr(repeats, "_equal_stages", lambda model, partition: [])
    assert skipping == dry_runs(config.init, trainable)(2)
