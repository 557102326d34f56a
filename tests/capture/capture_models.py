"""Models whose forward a graph can capture only in part, or not at all."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

WIDTH = 8
F = nn.functional


class Layer(nn.Module):
    """One linear layer and a buffer; subclasses define the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(WIDTH))


class Plain(Layer):
    def forward(self, x):
        return self.linear(x).tanh()


class ReadsNumber(Layer):
    def forward(self, x):
        return self.linear(x) * x.mean().item()


class Branches(Layer):
    def forward(self, x):
        if x.sum() > 0:
            return self.linear(x)
        return self.linear(x).sigmoid()


class Selects(Layer):
    def forward(self, x):
        rows = (x[:, 0] > 0).nonzero().squeeze(-1)
        return torch.zeros_like(x).index_add(0, rows, self.linear(x[rows]))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class CustomFunction(Layer):
    def forward(self, x):
        return Double.apply(self.linear(x))


class Remembers(Layer):
    def forward(self, x):
        self.last = self.linear(x)
        self.count.add_(1)
        return self.last


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


class GivesPair(Layer):
    def forward(self, x):
        return Pair(self.linear(x), x)


class TakesPair(Layer):
    def forward(self, pair, *, factor):
        return self.linear(pair.first) * factor + pair.second


class Odd(nn.Module):
    """A model of all these layers, some of them equal, and of a weight that another module reads."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (Plain, ReadsNumber, Branches, Selects, CustomFunction, Remembers, Plain, ReadsNumber, Plain)
        self.layers = nn.ModuleList(kind() for kind in kinds)
        self.pairs = nn.ModuleList([GivesPair(), TakesPair()])
        self.token = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        x = x + self.token
        for layer in self.layers:
            x = layer(x)
        gives, takes = self.pairs
        x = takes(gives(x), factor=3)
        return F.linear(x, self.layers[0].linear.weight).square().mean()
