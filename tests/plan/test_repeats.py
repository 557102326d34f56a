"""Dry runs that skip equal stages have the same trace as dry runs of all stages."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from headwater.config import load_params, shipped_params
from headwater.core.dry_run import costs_by_shapes
from headwater.plan import repeats, trace
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


@costs_by_shapes
class Scaled(nn.Module):
    """A layer that multiplies by a tensor, which autograd then saves."""

    def __init__(self, inner=None):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inner = inner

    def forward(self, x, scale):
        y = self.linear(x) * scale
        return x + (y if self.inner is None else self.inner(y))


class Scaling(nn.Module):
    """Layers called by `call(layer, place, x)` in `order`."""

    def __init__(self, call, order=range(10), make=Scaled):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(10))
        self.scales = nn.ParameterList(torch.ones(32, 8) for _ in range(10))
        self.call, self.order = call, order

    def forward(self, x):
        shared = [scale * 2 for scale in self.scales]
        for place, layer in enumerate(self.order):
            x = self.call(self.layers[layer], place, x, shared)
        return x.sum()


def by_place(places):
    return lambda layer, place, x, shared: layer(x, shared[places[place]])


@pytest.mark.parametrize("places", [[0, 1] * 5, [0] * 5 + [1] * 5], ids=["every other one", "halves"])
@pytest.mark.parametrize("order", [range(10), [5, 1, 9, 0, 3, 2, 8, 4, 7, 6]], ids=str)
def test_layers_share_saved_inputs_in_groups(places, order, monkeypatch):
    skipping, full = traces(
        Scaling(by_place(places), order), torch.zeros(32, 8, requires_grad=True), monkeypatch
    )
    assert skipping == full


def test_attention_biases_of_two_windows(skipped, monkeypatch):
    windows = {
        "position_embedding_type": "alibi",
        "attention_sliding_window_length": 4,
        "sliding_window_every_other_decoder_layer": True,
        "num_hidden_layers": 10,
    }
    overrides = [f"trainer.init.model.{name}={value}" for name, value in windows.items()]
    check_zoo(load_params(shipped_params()["gpt/tiny"], overrides), skipped, monkeypatch)


def with_autocast_in_the_second_half(layer, place, x, shared):
    with torch.autocast("cpu", torch.bfloat16, enabled=place >= 5):
        return layer(x, shared[0])


def with_other_hooks_in_the_second_half(layer, place, x, shared):
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with hooks if place >= 5 else contextlib.nullcontext():
        return layer(x, shared[0])


def with_gradients_in_the_second_half(layer, place, x, shared):
    with torch.set_grad_enabled(place >= 5):
        return layer(x, shared[0])


@pytest.mark.parametrize(
    "call",
    [
        with_autocast_in_the_second_half,
        with_other_hooks_in_the_second_half,
        with_gradients_in_the_second_half,
    ],
)
def test_layers_in_different_modes(call, monkeypatch):
    skipping, full = traces(Scaling(call), torch.zeros(32, 8, requires_grad=True), monkeypatch)
    assert skipping == full


class Checkpointed(nn.Module):
    """Layers in checkpoints of `size` layers each."""

    def __init__(self, size, *, reentrant):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(12))
        self.size, self.reentrant = size, reentrant

    def forward(self, x):
        for start in range(0, 12, self.size):
            layers = self.layers[start : start + self.size]
            run = lambda x, layers=layers: nn.Sequential.forward(layers, x)  # noqa: E731
            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return x.sum()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 12])
def test_checkpointed_groups_of_layers(size, reentrant, monkeypatch):
    model = Checkpointed(size, reentrant=reentrant)
    skipping, full = traces(model, torch.zeros(4, 8, requires_grad=True), monkeypatch)
    assert skipping == full


class Growing(nn.Module):
    """A part that computes more from its third call on."""

    calls = 0

    def forward(self, x):
        Growing.calls += 1
        return x.relu().relu() if Growing.calls > 3 else x.relu()


@pytest.mark.parametrize("change", ["part", "forward", "global hook"])
def test_a_layer_with_code_of_the_user_runs(change, skipped):
    model = Scaling(by_place([0] * 10), make=lambda: Scaled(Growing() if change == "part" else None))
    if change == "forward":
        for layer in model.layers:
            layer.linear.forward = torch.relu
    hook = (
        nn.modules.module.register_module_forward_hook(lambda *_: None) if change == "global hook" else None
    )
    try:
        trace_step(model, torch.zeros(32, 8, requires_grad=True))
    finally:
        if hook is not None:
            hook.remove()
    assert not skipped


@pytest.mark.parametrize("make", ["growing dropout", "buffers", "shared part", "flag"])
def test_layers_that_differ_in_one_part(make, monkeypatch):
    model = Scaling(by_place([0] * 10))
    shared = nn.Linear(8, 8)
    for place, layer in enumerate(model.layers):
        if make == "growing dropout":
            layer.inner = nn.Dropout(place / 10)
        elif make == "buffers":
            layer.inner = nn.BatchNorm1d(8)
        elif make == "shared part":
            layer.inner = shared if place % 2 else nn.Linear(8, 8)
        else:
            layer.inner = nn.ReLU(inplace=place % 3 == 0)
    skipping, full = traces(model, torch.zeros(32, 8, requires_grad=True), monkeypatch)
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
    runs, run = [], trace.Recorder.run
    monkeypatch.setattr(trace.Recorder, "run", lambda *words: (runs.append(words), run(*words)))
    skipping = dry_runs(config.init, trainable)(2)
    assert skipped
    assert len(runs) == 1, "the costs that were taken over have been dropped, and all stages have run"
    monkeypatch.setattr(repeats, "_equal_stages", lambda model, partition: [])
    assert skipping == dry_runs(config.init, trainable)(2)
