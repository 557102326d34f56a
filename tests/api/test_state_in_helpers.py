"""State that a forward changes through functions, methods, base classes, caches and unregistered modules."""

import functools
import weakref

import numpy as np
import pytest
import torch
from any_loop import adamw, check, randn
from torch import nn

import headwater as hw
from headwater.core.errors import StreamError

COUNTS = [0]
LOSSES = []
TABLE = {}
DRAWS = {}
"""What the helpers below change. `restart` gives it its first state."""


def restart():
    COUNTS[:] = [0]
    LOSSES.clear()
    TABLE.clear()
    mask.cache_clear()
    DRAWS.update(numpy=np.random.default_rng(0), torch=torch.Generator().manual_seed(5))


def count():
    COUNTS[0] += 1
    return COUNTS[0]


def counted_by_another():
    return 1.0 / count()


def note(loss):
    LOSSES.append(loss)


@functools.cache
def mask(size):
    return torch.tril(torch.ones(size, size))


def table(size):
    if size not in TABLE:
        TABLE[size] = torch.arange(size).float().cos()
    return TABLE[size]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class CountedInHelper(Layer):
    def forward(self, x):
        return super().forward(x) * counted_by_another()


class CountedInComprehension(Layer):
    def forward(self, x):
        return super().forward(x) / sum([count() for _ in range(2)])


class DrawnByNumpy(Layer):
    def forward(self, x):
        return super().forward(x) * float(DRAWS["numpy"].random())


class DrawnInMethod(Layer):
    def noise(self, x):
        return self.scaled(torch.rand(x.shape, generator=DRAWS["torch"]))

    def scaled(self, x):
        return x * 0.1 * count()

    def forward(self, x):
        return super().forward(x) + self.noise(x)


class DrawnInBase(DrawnInMethod):
    def forward(self, x):
        return x + super().forward(x)


class Noted(Layer):
    def forward(self, x):
        result = super().forward(x)
        note(result.square().mean() * 0.1)
        return result


class Masked(Layer):
    def forward(self, x):
        return super().forward(x @ mask(x.shape[-1]))


class Tabled(Layer):
    def forward(self, x):
        return super().forward(x * table(x.shape[-1]))


class Unregistered(Layer):
    def __init__(self):
        super().__init__()
        self.hidden = [nn.BatchNorm1d(6)]

    def forward(self, x):
        return super().forward(self.hidden[0](x))


class CountedInProperty(Layer):
    @property
    def scale(self):
        return 1.0 / count()

    def forward(self, x):
        return super().forward(x) * self.scale


class CountedInStaticMethod(Layer):
    @staticmethod
    def scale():
        return 1.0 / count()

    @classmethod
    def half(cls):
        return cls.scale() / 2

    def forward(self, x):
        return super().forward(x) * self.half()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.scale = 1.0 / count()
        return x * ctx.scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale


class CountedInAutograd(Layer):
    def forward(self, x):
        return super().forward(Scaled.apply(x))


class Helper:
    def scale(self):
        return 1.0 / count()

    def __getitem__(self, key):
        return self.scale()


class CountedInObject(Layer):
    def __init__(self):
        super().__init__()
        self.helper = Helper()

    def forward(self, x):
        return super().forward(x) * self.helper[0]


class CountedInSlot(Layer):
    __slots__ = ("calls",)

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) / self.calls


class CountedByParent(Layer):
    """A layer that counts its calls in another module, which it refers to weakly."""

    def __init__(self):
        super().__init__()
        self.parent = None

    def forward(self, x):
        self.parent().calls += 1
        return super().forward(x) / self.parent().calls


KINDS = [
    CountedInHelper, CountedInComprehension, DrawnByNumpy, DrawnInMethod, DrawnInBase, Noted, Masked, Tabled,
    Unregistered, CountedInProperty, CountedInStaticMethod, CountedInAutograd, CountedInObject, CountedInSlot,
    CountedByParent,
]  # fmt: skip


@pytest.mark.parametrize("plan", ["memory", "recompute"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_behind_functions_and_methods_is_as_in_plain_pytorch(kind, plan, tmp_path):
    def script(place):
        restart()
        model = nn.Sequential(*(kind() for _ in range(3)), nn.Linear(6, 2))
        model.calls = 0
        for layer in model:
            layer.parent = weakref.ref(model)
        model = place.compile(model)
        optimizer, losses = adamw(model.parameters()), []
        for step in range(3):
            loss = model(randn(4, 6, seed=step)).square().mean() + sum(LOSSES)
            LOSSES.clear()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        hidden = [layer.hidden[0].state_dict() for layer in model if hasattr(layer, "hidden")]
        return losses, list(COUNTS), hidden, model.state_dict()

    check(script, plan, tmp_path)


@pytest.mark.parametrize("plan", ["memory", "recompute"])
def test_state_behind_a_forward_that_replaces_that_of_its_class_is_as_in_plain_pytorch(plan, tmp_path):
    def script(place):
        restart()

        class Replaced(Layer):
            def forward(self, x):
                return self.linear(x)

        def counting(self, x):
            return self.linear(x) / count()

        model = place.compile(nn.Sequential(*(Replaced() for _ in range(3))))
        model(randn(2, 6, seed=0)).square().mean().backward()
        Replaced.forward = counting
        model(randn(8, 6, seed=1)).square().mean().backward()  # a larger batch needs a new plan
        return list(COUNTS), [param.grad for param in model.parameters()]

    check(script, plan, tmp_path)


class Called(Layer):
    def forward(self, x, function):
        return super().forward(x) * function(x.detach().mean())


class Caller(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Called() for _ in range(3))

    def forward(self, x, function):
        for layer in self.layers:
            x = layer(x, function)
        return x


@pytest.mark.parametrize("plan", ["memory", "recompute"])
def test_state_of_a_function_that_is_an_argument_is_as_in_plain_pytorch(plan, tmp_path):
    def script(place):
        seen, generator = [], torch.Generator().manual_seed(1)

        def function(mean):
            seen.append(mean)
            return torch.rand((), generator=generator) / len(seen)

        model = place.compile(Caller())
        optimizer, losses = adamw(model.parameters()), []
        for step in range(3):
            loss = model(randn(4, 6, seed=step), function).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, len(seen), model.state_dict()

    check(script, plan, tmp_path)


class ReadsWeight(torch.utils.data.Dataset):
    def __init__(self, weight):
        self.weight = weight

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.weight.detach().clone()


@pytest.mark.timeout(60)
def test_a_data_worker_that_reads_a_weight_on_disk_gets_an_error(tmp_path):
    backend = hw.backend("CSX", tier="disk", disk=str(tmp_path), num_slabs=2)
    model = hw.compile(nn.Sequential(*(Layer() for _ in range(3))), backend)
    model(torch.ones(2, 6)).sum().backward()
    loader = torch.utils.data.DataLoader(
        ReadsWeight(model[0].linear.weight), num_workers=1, multiprocessing_context="fork"
    )
    with pytest.raises((RuntimeError, StreamError), match="fork of the process"):
        list(loader)
