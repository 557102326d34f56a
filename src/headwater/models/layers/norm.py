"""Layer normalization that keeps the dtype of the residual stream."""

from __future__ import annotations

from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` whose weights may be wider than its input: fp32 weights on a bf16 stream.

    Statistics and affine part are computed in the dtype of the weights, the output has that of the input.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type == "cpu" or input.dtype == self.weight.dtype:
            # The CPU kernel takes mixed dtypes without a copy of the input.
            return super().forward(input).to(input.dtype)
        return super().forward(input.to(self.weight.dtype)).to(input.dtype)
