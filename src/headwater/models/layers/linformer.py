"""Linformer (arXiv:2006.04768): projections of keys and values along the sequence to a fixed length."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from headwater.models.layers.linear import Linear


class SequenceProjection(Linear):
    """Weighted sums over the positions of a sequence.

    [batch, heads, seq, size] -> [batch, heads, projected, size].

    Args:
        max_length: maximum positions; a shorter sequence uses the weights of the first positions.
        projected_length: number of sums.
    """

    def __init__(self, max_length: int, projected_length: int) -> None:
        super().__init__(max_length, projected_length, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Transposed, the sum over positions is one matrix product. The attention kernels need the elements of
        # a head contiguous.
        return F.linear(x.mT, self.weight[:, : x.shape[2]]).mT.contiguous()


class KeyValueProjection(nn.Module):
    """Projections of the keys and values of all heads (arXiv:2006.04768, equation 7).

    Args:
        keys: projection of the keys.
        values: projection of the values; may be the same module.
    """

    def __init__(self, keys: SequenceProjection, values: SequenceProjection) -> None:
        super().__init__()
        self.keys = keys
        self.values = values

    def forward(self, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the projected keys and values, each [batch, heads, projected_length, size].

        Args:
            key: keys, [batch, heads, seq, size].
            value: values, [batch, heads, seq, size].
            mask: True for visible positions, bool [batch, 1, 1, seq]; other positions are left out of the
                sums.
        """
        if mask is not None:
            key, value = (part.masked_fill(~mask.mT, 0) for part in (key, value))
        return self.keys(key), self.values(value)
