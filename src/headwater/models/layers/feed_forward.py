"""The position-wise feed-forward layer of a transformer block."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.config.models.common import Nonlinearity
from headwater.models.layers.linear import Linear, LinearAfter


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


NONLINEARITIES: dict[Nonlinearity, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "squared_relu": _squared_relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_new": _gelu_tanh,
    "reglu": F.relu,
}
"""Elementwise functions by their names in params files; `…_new` use the tanh approximation of GPT-2."""

GATED: frozenset[Nonlinearity] = frozenset({"swiglu", "geglu", "geglu_new", "reglu"})
"""Gated nonlinearities (arXiv:2002.05202): a function of a second product, the gate, times the first."""


def _gated(function: Callable[[Tensor], Tensor], gate: Tensor, x: Tensor) -> Tensor:
    return function(gate) * x


# One object for each name: dry runs find equal layers by the identity of their functions.
_FUNCTIONS: dict[Nonlinearity, Callable[..., Tensor]] = {
    name: functools.partial(_gated, function) if name in GATED else function
    for name, function in NONLINEARITIES.items()
}


class FeedForward(nn.Module):
    """Linear, nonlinearity, linear, dropout: [..., hidden] -> [..., hidden].

    Args:
        hidden_size: width of input and output.
        filter_size: width between the two linear layers.
        nonlinearity: one of `NONLINEARITIES`; a gated one adds a third linear layer, `gate`.
        bias: add a bias to every linear layer.
        dropout: dropout rate of the output.
        inner_dropout: dropout rate after the nonlinearity.
    """

    def __init__(
        self,
        hidden_size: int,
        filter_size: int,
        nonlinearity: Nonlinearity,
        *,
        bias: bool,
        dropout: float,
        inner_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.input = Linear(hidden_size, filter_size, bias=bias)
        self.gate = Linear(hidden_size, filter_size, bias=bias) if nonlinearity in GATED else None
        self.function = _FUNCTIONS[nonlinearity]
        self.inner_dropout = nn.Dropout(inner_dropout)
        self.output: Linear = (
            Linear(filter_size, hidden_size, bias=bias)
            if inner_dropout
            else LinearAfter(self.function, filter_size, hidden_size, bias=bias)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        inputs = (self.input(x),) if self.gate is None else (self.gate(x), self.input(x))
        if isinstance(self.output, LinearAfter):
            given = self.output(*inputs, apply_function=True)
        else:  # with dropout in between, with adapters, or wrapped by the user
            given = self.output(self.inner_dropout(self.function(*inputs)))
        output: Tensor = self.dropout(given)
        return output
