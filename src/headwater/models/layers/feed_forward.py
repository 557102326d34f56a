"""The position-wise feed-forward part of a transformer block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.config.models import Nonlinearity
from headwater.models.layers.linear import Linear


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


NONLINEARITIES: dict[Nonlinearity, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}
"""Elementwise functions by their name in a params file; `gelu_new` is the tanh approximation of GPT-2."""


class FeedForward(nn.Module):
    """Linear, nonlinearity, linear, dropout: [..., hidden] -> [..., hidden]."""

    def __init__(
        self, hidden_size: int, filter_size: int, nonlinearity: Nonlinearity, *, bias: bool, dropout: float
    ) -> None:
        super().__init__()
        self.input = Linear(hidden_size, filter_size, bias=bias)
        self.nonlinearity = NONLINEARITIES[nonlinearity]
        self.output = Linear(filter_size, hidden_size, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.dropout(self.output(self.nonlinearity(self.input(x))))
        return output
