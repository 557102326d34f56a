"""Models that use weights in unusual ways, all of them legal PyTorch."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from harness import Job, regression, token_batch
from torch import nn

WIDTH = 8
F = nn.functional


def linears(count: int) -> list[nn.Linear]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


class Twice(nn.Module):
    """A model that uses one module twice, and once more in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linears(3))

    def forward(self, x):
        a, b, c = self.layers
        return a(c(b(a(b(x)).tanh())))


@dataclasses.dataclass
class Pair:
    """An output that pytree does not know."""

    first: torch.Tensor
    second: torch.Tensor


class ManyOutputs(nn.Module):
    """A model that takes a tuple and keywords, and returns tuples, dictionaries and dataclasses."""

    class Block(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind
            self.left, self.right = linears(2)

        def forward(self, x, *, y):
            x, y = self.left(x + y), self.right(y)
            return {"tuple": (x, y), "dict": {"x": x, "y": y}, "dataclass": Pair(x, y)}[self.kind]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block(kind) for kind in ("tuple", "dict", "dataclass"))

    def forward(self, x):
        x, y = self.blocks[0](x, y=x.sin())
        out = self.blocks[1](x, y=y)
        pair = self.blocks[2](out["x"], y=out["y"])
        return pair.first + pair.second


class ClassToken(nn.Module):
    """A container that holds parameters itself: a token and a position table."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.blocks = nn.ModuleList(linears(3))

    def forward(self, x):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x).tanh()
        return x * self.positions


class ForeignRead(nn.Module):
    """A model whose head multiplies by the weight of an embedding that another module owns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, WIDTH)
        self.blocks = nn.ModuleList(linears(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x).tanh()
        return F.linear(self.head(x), torch.cat([self.embed.weight[:50], self.embed.weight[50:]]))


class PassesViews(nn.Module):
    """A model that passes a view of a weight to another module, which uses it after the owner's forward."""

    class User(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, view):
            return self.own(x) @ view.t()

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x):
            return self.own(x)[..., :WIDTH], self.own.weight[WIDTH:]

    def __init__(self) -> None:
        super().__init__()
        self.owner = self.Owner()
        self.users = nn.ModuleList(self.User() for _ in range(3))

    def forward(self, x):
        x, view = self.owner(x)
        for user in self.users:
            x = user(x, view)
        return x


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.core(x, x.flip(1))


class MixtureOfExperts(nn.Module):
    """Experts: each token goes to the one with the highest router score; an expert may get no token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(linears(4))

    def forward(self, x):
        weight, choice = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().squeeze(-1)
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return out


class RandomOrder(nn.Module):
    """A model that uses three of six layers in an order that changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linears(6))

    def forward(self, x):
        for index in random.Random(torch.initial_seed()).sample(range(6), 3):
            x = self.layers[index](x).tanh()
        return x


class DependsOnData(nn.Module):
    """A model in which a number read from a tensor decides whether a layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linears(5))

    def forward(self, x):
        for layer in self.layers:
            if x.mean().item() > -0.1:
                x = layer(x).tanh()
            x = self.layers[0](x)
        return x


class Unused(nn.Module):
    """A module, and a parameter in a used module, that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(linears(3))
        self.idle = nn.Linear(WIDTH, WIDTH)
        self.blocks[1].register_parameter("spare", nn.Parameter(torch.randn(3)))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Nested(nn.Module):
    """A model of containers within containers."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({
            "a": nn.ModuleList(nn.ModuleList(linears(2)) for _ in range(2)),
            "b": nn.ModuleList([nn.Sequential(*linears(2)), nn.Sequential(*linears(2))]),
        })  # fmt: skip

    def forward(self, x):
        for first, second in self.towers["a"]:
            x = second(first(x).tanh())
        for block in self.towers["b"]:
            x = block(x).tanh()
        return x


class KeepsTable(nn.Module):
    """A model that keeps a tensor and a counter in plain attributes, made at the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linears(3))
        self.table: torch.Tensor | None = None
        self.calls = 0

    def forward(self, x):
        if self.table is None:
            self.table = torch.linspace(0, 1, WIDTH)
        self.calls += 1
        for layer in self.layers:
            x = layer(x + self.table * self.calls).tanh()
        return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = linears(2)
        self.core = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.leave(self.core(self.enter(x))[0])


def batch_norms() -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*layers)


def parametrized() -> nn.Module:
    return nn.Sequential(*(nn.utils.parametrizations.weight_norm(layer) for layer in linears(4)))


def spectral() -> nn.Module:
    """Return a model with spectral norm, whose forward changes the vectors behind its weights."""
    return nn.Sequential(*(nn.utils.parametrizations.spectral_norm(layer) for layer in linears(4)))


class MovingAverage(nn.Module):
    """A model whose forward assigns a new tensor to a buffer instead of changing it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linears(1)[0]
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        x = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return (x - self.mean).tanh().square()


class EmptyParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*linears(3))
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, x):
        return self.layers(x) + self.nothing.sum()


class KeepsOutputs(nn.Module):
    """A model that keeps its outputs, and so their graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linears(4))
        self.outputs: list[torch.Tensor] = []

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        self.outputs.append(x)
        return x


def tied_in_a_ring() -> nn.Module:
    model = nn.Sequential(*linears(4))
    model[2].weight = model[0].weight
    model[3].bias = model[1].bias
    return model


def root_parameters() -> nn.Module:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x):
            return x @ self.weight

    return Root()


def _square(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch) - 1).square().mean()


JOBS: dict[str, Callable[..., Job]] = {
    "used twice": lambda **o: regression(Twice, 4, WIDTH, **o),
    "many outputs": lambda **o: regression(ManyOutputs, 4, WIDTH, **o),
    "class token": lambda **o: regression(ClassToken, 2, 4, WIDTH, **o),
    "read by another": lambda **o: Job(ForeignRead, token_batch, _square, **o),
    "views passed on": lambda **o: regression(PassesViews, 4, WIDTH, **o),
    "encoder-decoder": lambda **o: regression(EncoderDecoder, 2, 5, WIDTH, **o),
    "mixture of experts": lambda **o: regression(MixtureOfExperts, 6, WIDTH, **o),
    "random order": lambda **o: regression(RandomOrder, 4, WIDTH, **o),
    "depends on data": lambda **o: regression(DependsOnData, 4, WIDTH, **o),
    "unused": lambda **o: regression(Unused, 4, WIDTH, **o),
    "nested": lambda **o: regression(Nested, 4, WIDTH, **o),
    "keeps a table": lambda **o: regression(KeepsTable, 4, WIDTH, **o),
    "recurrent": lambda **o: regression(Recurrent, 2, 5, WIDTH, **o),
    "batch norm": lambda **o: regression(batch_norms, 2, 3, 6, 6, **o),
    "weight norm": lambda **o: regression(parametrized, 4, WIDTH, **o),
    "spectral norm": lambda **o: regression(spectral, 4, WIDTH, **o),
    "moving average": lambda **o: regression(
        lambda: nn.Sequential(*(MovingAverage() for _ in range(3))), 4, WIDTH, **o
    ),
    "empty parameter": lambda **o: regression(EmptyParameter, 4, WIDTH, **o),
    "keeps outputs": lambda **o: regression(KeepsOutputs, 4, WIDTH, **o),
    "tied": lambda **o: regression(tied_in_a_ring, 4, WIDTH, **o),
    "root holds all": lambda **o: regression(root_parameters, 4, WIDTH, **o),
    "one layer": lambda **o: regression(lambda: nn.Linear(WIDTH, WIDTH), 4, WIDTH, **o),
}
