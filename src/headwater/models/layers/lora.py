"""A linear layer with low-rank adapters (arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.models.layers.linear import Linear


class LoRALinear(Linear):
    """A linear layer with adapters: `x·Wᵀ + b`, plus `scale · x·Aᵀ·Bᵀ` on some outputs.

    [..., inputs] -> [..., outputs]. If several matrices are stacked in `W`, each has its own A and B, stacked
    in the same order.

    Args:
        inputs: width of the input.
        outputs: width of the output.
        rank: rows of each A.
        scale: factor on the adapters' outputs.
        dropout: dropout rate of the adapters' input.
        rows: outputs of each matrix that has an adapter.
        bias: add a bias.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        rank: int,
        scale: float,
        dropout: float,
        rows: Sequence[slice],
        bias: bool,
    ) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.scale = scale
        self.rows = list(rows)
        self.sizes = [part.stop - part.start for part in rows]
        self.lora_a = nn.Parameter(torch.empty(len(rows) * rank, inputs))
        self.lora_b = nn.Parameter(torch.empty(sum(self.sizes), rank))
        self.lora_dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        output = self.multiply(x, self.weight, self.bias)
        inner = self.multiply(F.dropout(x, self.lora_dropout, self.training), self.lora_a, None)
        parts = zip(inner.chunk(len(self.rows), -1), self.lora_b.split(self.sizes), strict=True)
        added = [self.multiply(narrow, b, None) * self.scale for narrow, b in parts]
        if self.sizes == [output.shape[-1]]:
            return output + added[0]
        pieces, end = [], 0
        for part, more in zip(self.rows, added, strict=True):
            pieces += [output[..., end : part.start], output[..., part] + more]
            end = part.stop
        return torch.cat([*pieces, output[..., end:]], -1)


def merged(weight: Tensor, a: Tensor, b: Tensor, rows: Sequence[slice], scale: float) -> Tensor:
    """Return the weight [outputs, inputs] of the linear layer that is equivalent to a `LoRALinear`.

    Args:
        weight: the weight W, [outputs, inputs].
        a: all A, stacked.
        b: all B, stacked.
        rows: outputs of each matrix that has an adapter.
        scale: factor on the adapters' outputs.
    """
    result = weight.clone()
    sizes = [part.stop - part.start for part in rows]
    for part, low, high in zip(rows, a.chunk(len(rows)), b.split(sizes), strict=True):
        result[part] += (scale * (high.float() @ low.float())).to(weight.dtype)
    return result
