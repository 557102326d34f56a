"""Keys and values projected along the sequence to a fixed length (Linformer, arXiv:2006.04768)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from headwater.models.layers.linear import Linear


class SequenceProjection(Linear):
    """Sums of the positions of a sequence: [batch, heads, seq, size] -> [batch, heads, projected, size].

    Args:
        max_length: positions at most; of a shorter sequence the first ones count.
        projected_length: sums.
    """

    def __init__(self, max_length: int, projected_length: int) -> None:
        super().__init__(max_length, projected_length, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Along the last dimension it is one product; kernels of attention want elements of a head in a row.
        return F.linear(x.mT, self.weight[:, : x.shape[2]]).mT.contiguous()


class KeyValueProjection(nn.Module):
    """Keys and values of all heads, projected (arXiv:2006.04768, equation 7).

    Args:
        keys: projection of the keys.
        values: that of the values; may be the same module.
    """

    def __init__(self, keys: SequenceProjection, values: SequenceProjection) -> None:
        super().__init__()
        self.keys = keys
        self.values = values

    def forward(self, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Projected keys and values [batch, heads, projected_length, size].

        Args:
            key: [batch, heads, seq, size].
            value: likewise.
            mask: bool [batch, 1, 1, seq], which positions are seen; others add nothing to any sum.
        """
        if mask is not None:
            key, value = (part.masked_fill(~mask.mT, 0) for part in (key, value))
        return self.keys(key), self.values(value)
