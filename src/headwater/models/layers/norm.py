"""Normalizations that keep the dtype of the residual stream."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NormType = Literal["layernorm", "biasless-layernorm", "rmsnorm"]


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` whose weights may have a wider dtype than its input, for example fp32 and bf16.

    Statistics and affine transform are computed in the dtype of the weights; the output has the dtype of the
    input. Without weights, statistics are computed at least in fp32.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type == "cpu" or not self.elementwise_affine or input.dtype == self.weight.dtype:
            # The CPU kernel supports mixed dtypes without a copy of the input.
            return super().forward(input).to(input.dtype)
        return super().forward(input.to(self.weight.dtype)).to(input.dtype)


class RMSNorm(nn.Module):
    """RMS normalization with a factor per element (arXiv:1910.07467): [..., width] -> same shape.

    It is computed at least in fp32; the output has the dtype of the input.

    Args:
        width: elements that are normalized together.
        epsilon: number that is added to the mean square.
        unit_offset: the factor is 1 + weight (Gemma).
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


def make_norm(kind: NormType, width: int, epsilon: float, *, unit_offset: bool = False) -> nn.Module:
    """Return the normalization layer of a kind.

    Args:
        kind: the key `norm_type` of a model section.
        width: elements that are normalized together.
        epsilon: number that is added to the variance or the mean square.
        unit_offset: with `rmsnorm`, the factor is 1 + weight (Gemma).
    """
    if kind == "rmsnorm":
        return RMSNorm(width, epsilon, unit_offset=unit_offset)
    return LayerNorm(width, epsilon, bias=kind == "layernorm")
