"""Normalizations that keep the dtype of the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` whose weights may be wider than its input: fp32 weights on a bf16 stream.

    Statistics and affine part are computed in the dtype of the weights, the output has that of the input.
    Without an affine part, statistics are computed in fp32 at least.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type == "cpu" or not self.elementwise_affine or input.dtype == self.weight.dtype:
            # The CPU kernel takes mixed dtypes without a copy of the input.
            return super().forward(input).to(input.dtype)
        return super().forward(input.to(self.weight.dtype)).to(input.dtype)


class RMSNorm(nn.Module):
    """Division by the root of the mean square, then a factor for each element (arXiv:1910.07467).

    Computed in fp32 at least, the output has the dtype of the input: [..., width] -> same.

    Args:
        width: elements that are normalized together.
        epsilon: added to the mean square.
        unit_offset: the factor is one more than the weight (Gemma).
    """

    def __init__(self, width: int, epsilon: float, *, unit_offset: bool = False) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.unit_offset = unit_offset
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide) + 1 if self.unit_offset else self.weight.to(wide)
        return F.rms_norm(x.to(wide), self.weight.shape, weight, self.epsilon).to(x.dtype)
