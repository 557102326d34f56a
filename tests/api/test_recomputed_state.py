"""Stages that are recomputed in backward find the state of their forward, whatever has changed since."""

import dataclasses
import functools
import random

import numpy as np
import pytest
import torch
from any_loop import Place, check
from torch import nn

from headwater.core.errors import StreamError

RECOMPUTED = ["recompute", "recompute on disk"]


class Block(nn.Module):
    """A stage whose forward reads attributes, a list, a buffer, and an unregistered tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.2)
        self.scale = 1.0
        self._calls = 0
        self.lengths = []
        self.mean = torch.zeros(6)
        self.register_buffer("average", None)

    def forward(self, x):
        self._calls += 1
        self.lengths.append(len(x))
        self.mean += x.detach().mean(0)
        if self.average is None:
            self.average = x.detach().mean(0)
        x = x * self.scale + self._calls + len(self.lengths) + self.mean + self.average
        return torch.tanh(self.dropout(self.layer(x)))


def network(block):
    return nn.Sequential(nn.Linear(6, 6), block, nn.Linear(6, 3))


def train(place, block, call, steps=3):
    """Take steps; `call(model, step, x)` returns the outputs whose squares are the loss."""
    model = place.compile(network(block))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shown = []
    for step in range(steps):
        outputs = call(model, step, torch.randn(4, 6))
        sum(output.square().mean() for output in outputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        shown += outputs
    return shown, model, vars(block).get("_calls"), vars(block).get("lengths"), list(block.buffers())


def set_scale(block, value):
    block.scale = value


def set_tensor(block, value):
    block.scale = torch.tensor(float(value))


def fill_mean(block, value):
    block.mean.fill_(value)


def set_dropout(block, value):
    block.dropout.p = value / 10


def change_list(block, value):
    block.lengths[:] = [0] * value


@pytest.mark.parametrize("plan", RECOMPUTED)
@pytest.mark.parametrize(
    "change", [set_scale, set_tensor, fill_mean, set_dropout, change_list], ids=lambda change: change.__name__
)
def test_state_that_changes_between_two_forwards_of_a_step(plan, change, tmp_path):
    def call(model, step, x):
        change(model[1], 2)
        first = model(x)
        change(model[1], 5)
        second = model(x * 2)
        change(model[1], 7)
        return first, second

    check(lambda place: train(place, Block(), call), plan, tmp_path)


@pytest.mark.parametrize("plan", RECOMPUTED)
def test_mode_that_changes_before_backward(plan, tmp_path):
    def call(model, step, x):
        model.train()
        first = model(x)
        model.eval()
        return first, model(x)

    check(lambda place: train(place, Block(), call), plan, tmp_path)


@pytest.mark.parametrize("plan", RECOMPUTED)
def test_hook_that_is_removed_before_backward(plan, tmp_path):
    def call(model, step, x):
        handle = model[1].layer.register_forward_hook(lambda module, args, output: output * 3)
        output = model(x)
        handle.remove()
        return (output,)

    check(lambda place: train(place, Block(), call), plan, tmp_path)


def new_weight(model):
    model[1].layer.weight = nn.Parameter(torch.randn(6, 6))


def new_part(model):
    model[1].dropout = nn.ReLU()


@pytest.mark.parametrize("plan", RECOMPUTED)
@pytest.mark.parametrize("change", [new_weight, new_part], ids=["weight", "part"])
def test_structure_that_changes_before_backward(plan, change, tmp_path):
    def script(place):
        model = place.compile(network(Block()))
        names, weights = zip(*model.named_parameters(), strict=True)
        output = model(torch.ones(4, 6).cumsum(1))
        change(model)
        output.square().mean().backward()
        return output, {name: weight.grad for name, weight in zip(names, weights, strict=True)}

    check(script, plan, tmp_path)


@pytest.mark.parametrize("plan", RECOMPUTED)
def test_functional_call_of_a_model_with_a_module_under_two_names(plan, tmp_path):
    """Torch's `functional_call` leaves its tensors in such a module."""

    def script(place):
        shared = nn.Linear(6, 6)
        model = place.compile(nn.Sequential(shared, shared, nn.Tanh(), nn.Linear(6, 2)))
        weight, inputs = shared.weight, torch.ones(4, 6).cumsum(1)
        output = model(inputs)
        values = {name: value.detach() * 0.5 for name, value in model.named_parameters()}
        torch.func.functional_call(model, values, (inputs,))
        output.square().mean().backward()
        return output, weight.grad

    check(script, plan, tmp_path)


@pytest.mark.parametrize("plan", RECOMPUTED)
@pytest.mark.filterwarnings("ignore::headwater.api.references.StaleTensorWarning")
def test_spectral_norm_in_two_forwards_of_a_step(plan, tmp_path):
    def call(model, step, x):
        return model(x), model(x * 2)

    check(lambda place: train(place, nn.utils.spectral_norm(nn.Linear(6, 6)), call), plan, tmp_path)


@pytest.mark.parametrize("plan", RECOMPUTED)
def test_gradient_penalty_through_a_batch_norm(plan, tmp_path):
    def call(model, step, x):
        first = model(x)
        inputs = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return first, slope

    check(lambda place: train(place, nn.BatchNorm1d(6), call), plan, tmp_path)


class Drawing(nn.Module):
    """A stage whose forward draws numbers from a generator that is not torch's default one."""

    def __init__(self, draw, generator):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.draw = draw
        self.generator = generator

    def forward(self, x):
        return self.layer(x) * self.draw(self.generator)


GENERATORS = {
    "python": lambda: (lambda generator: random.random(), None),
    "numpy": lambda: (lambda generator: float(np.random.randn()), None),
    "own python": lambda: (lambda generator: generator.random(), random.Random(0)),
    "own numpy": lambda: (lambda generator: float(generator.random()), np.random.default_rng(0)),
    "old numpy": lambda: (lambda generator: float(generator.randn()), np.random.RandomState(0)),
    "own torch": lambda: (
        lambda generator: torch.rand(6, generator=generator),
        torch.Generator().manual_seed(0),
    ),
}


@pytest.mark.parametrize("plan", ["slabs", "recompute"])
@pytest.mark.parametrize("kind", GENERATORS)
def test_numbers_from_a_random_generator(plan, kind, tmp_path):
    def script(place):
        random.seed(0)
        np.random.seed(0)
        return train(place, Drawing(*GENERATORS[kind]()), lambda model, step, x: (model(x), model(x)))

    check(script, plan, tmp_path)


@dataclasses.dataclass(slots=True)
class Count:
    """An object that keeps its attribute in a slot, without a dictionary."""

    calls: int = 0


class Counting(nn.Module):
    """A stage whose output depends on the number of its forwards."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.count = Count()

    def forward(self, x):
        self.count.calls += 1
        return torch.tanh(self.layer(x) * self.count.calls)


@pytest.mark.parametrize("plan", ["memory", *RECOMPUTED])
def test_an_object_with_slots_counts_each_forward_once(plan, tmp_path):
    check(lambda place: train(place, Counting(), lambda model, step, x: (model(x),)), plan, tmp_path)


class Growing(nn.Module):
    """A stage whose buffer gets another row in each forward, by `resize_`, so in the same tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("means", torch.zeros(1, 6))

    def forward(self, x):
        with torch.no_grad():
            self.means.resize_(len(self.means) + 1, 6)[-1] = x.mean(0)
        return torch.tanh(self.layer(x) + self.means.mean(0))


@pytest.mark.parametrize("plan", RECOMPUTED)
def test_a_buffer_that_grows_in_place(plan, tmp_path):
    check(lambda place: train(place, Growing(), lambda model, step, x: (model(x), model(x))), plan, tmp_path)


class Patched(nn.Linear):
    """A layer whose class gets another forward."""


@pytest.mark.parametrize("plan", ["memory", *RECOMPUTED])
def test_the_forward_of_a_class_is_patched_between_steps(plan, tmp_path, monkeypatch):
    def call(model, step, x):
        if step == 1:
            monkeypatch.setattr(Patched, "forward", lambda self, x: 2 * nn.functional.linear(x, self.weight))
        return (model(x),)

    def script(place):
        with monkeypatch.context():
            monkeypatch.setattr(Patched, "forward", nn.Linear.forward)
            return train(place, Patched(6, 6), call)

    check(script, plan, tmp_path)


def halve(model, optimizer):
    with torch.no_grad():
        model[1].layer.weight.mul_(0.5)


def halve_data(model, optimizer):
    model[1].layer.weight.data.mul_(0.5)


def load(model, optimizer):
    model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})


def take_step(model, optimizer):
    model(torch.ones(4, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("plan", RECOMPUTED)
@pytest.mark.parametrize("change", [halve, halve_data, load, take_step], ids=lambda change: change.__name__)
def test_weights_that_change_before_backward_are_refused(plan, change, tmp_path):
    """The second run of a forward would use the new weights. Plain PyTorch raises for most of the changes."""
    (tmp_path / "streamed").mkdir()
    place = Place(plan, tmp_path / "streamed")
    model = place.compile(network(Block()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    take_step(model, optimizer)
    loss = model(torch.ones(4, 6).cumsum(1)).square().mean()
    change(model, optimizer)
    with pytest.raises(StreamError, match=r"changed between this forward and its backward|changed in place"):
        loss.backward()
    optimizer.zero_grad()
    take_step(model, optimizer)
    place.release()


@pytest.mark.parametrize("plan", RECOMPUTED)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_weights_that_change_before_backward_are_refused_in_another_store(plan, before, tmp_path):
    """A bias that is trained from now on has a state, so all weights move to another store."""
    (tmp_path / "streamed").mkdir()
    place = Place(plan, tmp_path / "streamed")
    plain = network(Block())
    plain[0].bias.requires_grad_(False)
    model = place.compile(plain)
    optimizer = torch.optim.SGD([*model.parameters()], lr=0.1)
    take_step(model, optimizer)
    first, second = [model(torch.ones(4, 6).cumsum(1)).square().mean() for _ in range(2)]
    if before:
        halve_data(model, optimizer)
    model[0].bias.requires_grad_(True)
    model(torch.ones(4, 6))
    if not before:
        first.backward()  # the move itself changes no weights
        halve_data(model, optimizer)
    with pytest.raises(StreamError, match="changed between this forward and its backward"):
        second.backward()
    optimizer.zero_grad()
    take_step(model, optimizer)
    place.release()


class ChangesOutputs(nn.Module):
    """A model that changes the outputs of its blocks in place."""

    def __init__(self, change, *, apart):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Sigmoid()) for _ in range(3))
        self.change = change
        self.apart = apart  # change a copy instead

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x = self.change(x.clone() if self.apart else x)
        return x


CHANGES = {
    "relu": lambda x: nn.functional.relu(x, inplace=True),
    "mul": lambda x: x.mul_(0.5),
    "one row": lambda x: x.index_fill_(0, torch.tensor([0]), 0.25),
}


@pytest.mark.parametrize("change", [*CHANGES])
@pytest.mark.parametrize("plan", RECOMPUTED)
def test_outputs_of_recomputed_blocks_that_change_in_place(plan, change, tmp_path):
    """The gradients are those of an operator that returns a new tensor, as with `torch.utils.checkpoint`.

    Plain PyTorch without recomputation refuses this: the sigmoid needs the output that was changed.
    """
    with pytest.raises(RuntimeError, match="inplace operation"):
        ChangesOutputs(CHANGES[change], apart=False)(torch.ones(4, 6)).sum().backward()

    def script(place):
        model = ChangesOutputs(CHANGES[change], apart=place.plan is None)
        return train(place, model, lambda model, step, x: (model(x),))

    check(script, plan, tmp_path)


FIRST_LAYERS = {
    "relu": lambda: nn.ReLU(inplace=True),
    "dropout": lambda: nn.Dropout(0.5, inplace=True),
}


@pytest.mark.parametrize("plan", ["memory", *RECOMPUTED])
@pytest.mark.parametrize("kind", FIRST_LAYERS)
def test_blocks_that_change_their_inputs_in_place_equal_plain(plan, kind, tmp_path):
    """Plain PyTorch accepts this if no backward needs the input. Such a block cannot run again."""

    def script(place):
        blocks = [nn.Sequential(FIRST_LAYERS[kind](), nn.Linear(6, 12), nn.Linear(12, 6)) for _ in range(3)]
        model = place.compile(nn.Sequential(nn.Linear(6, 6), *blocks))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            loss = model(torch.randn(4, 6)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, model

    check(script, plan, tmp_path)


class Shift(nn.Module):
    """A module whose backward does not need the input."""

    def __init__(self):
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))

    def forward(self, x):
        return x + torch.tanh(self.shift.expand_as(x) * self.scale)


class DoublesAfterwards(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.shifts = nn.ModuleList(Shift() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for shift in self.shifts:
            y = shift(x)
            x.mul_(2)
            x = x + y
        return x


@pytest.mark.parametrize("plan", ["memory", *RECOMPUTED])
def test_inputs_of_blocks_that_are_changed_in_place_afterwards_equal_plain(plan, tmp_path):
    def script(place):
        model = place.compile(DoublesAfterwards())
        losses = []
        for step in range(3):
            loss = model(torch.full((4, 6), float(step))).square().mean()
            loss.backward()
            losses.append(loss.item())
        return losses, [param.grad for param in model.parameters()]

    check(script, plan, tmp_path)


class Helper(nn.Module):
    """A module with a buffer and attributes that its forward changes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.layer = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layer(self.norm(x)).tanh() * self.calls

    def method(self, x):
        return self(x)


@dataclasses.dataclass
class Holder:
    helper: nn.Module

    def __call__(self, x):
        return self.helper(x)


class Caller(nn.Module):
    """A stage that calls one of its arguments."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x, call):
        return torch.tanh(call(self.layer(x)))


class Passing(nn.Module):
    """A model that passes one of its modules to others."""

    def __init__(self, way):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.helper = Helper()
        self.callers = nn.ModuleList(Caller() for _ in range(3))
        self.way = way

    def forward(self, x):
        x = self.first(x)
        for caller in self.callers:
            x = caller(x, self.way(self.helper))
        return x


@pytest.mark.parametrize("plan", ["memory", *RECOMPUTED])
@pytest.mark.parametrize(
    "way",
    [lambda helper: helper, functools.partial, lambda helper: helper.method, Holder],
    ids=["module", "partial", "method", "attribute"],
)
def test_module_that_a_block_gets_as_an_argument(plan, way, tmp_path):
    def script(place):
        model = place.compile(Passing(way))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shown = []
        for _ in range(3):
            loss = model(torch.randn(4, 6)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            shown += loss, model.helper.calls
        return shown, model

    check(script, plan, tmp_path)


class Wrapping(nn.Module):
    """A stage that turns every exception of its layers into another one."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        try:
            return self.layer(torch.tanh(x)).exp().clamp(max=5)
        except Exception as error:  # this is what the test is about
            raise ValueError("this layer has failed") from error


class Falling(Wrapping):
    """A stage that computes something else after an exception."""

    def forward(self, x):
        try:
            return super().forward(x)
        except Exception:  # noqa: BLE001 - a forward of a library may catch all exceptions like this
            return self.layer(x).tanh()


@pytest.mark.parametrize("plan", RECOMPUTED)
@pytest.mark.parametrize("kind", [Wrapping, Falling], ids=["another exception", "another result"])
def test_forward_that_catches_every_exception(plan, kind, tmp_path):
    """The end of the second run must not look like an error of the forward."""

    def script(place):
        model = place.compile(network(kind()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            losses.append(model(torch.randn(4, 6)).square().mean())
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        return losses, model

    check(script, plan, tmp_path)
