"""Blocks that another process can import."""

import torch
from torch import nn


class Shifted(nn.Module):
    """A block with two names for one weight, and a buffer of indices."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.again = self.linear
        self.register_buffer("order", torch.tensor([7, 6, 5, 4, 3, 2, 1, 0]))

    def forward(self, x, mask=None):
        y = self.again(self.linear(x))[..., self.order]
        return x + (y if mask is None else y * mask[..., None])


class Failing(Shifted):
    """A block that cannot compute with made-up values."""

    def forward(self, x, mask=None):
        raise ValueError("no values, no output")
