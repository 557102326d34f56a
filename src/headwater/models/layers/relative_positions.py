"""Learned attention biases by the distance of two tokens (arXiv:1910.10683, section 2.1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwater.models.layers.linear import Embedding


def relative_buckets(distance: Tensor, *, num_buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """Return the bucket of each distance, int64 of the same shape.

    In each direction, the first half of the buckets holds one distance each: 0, 1, 2, … The second half
    divides the distances up to `max_distance` evenly on a logarithmic scale. The last bucket also holds all
    greater distances (arXiv:1910.10683, section 2.1, and the code published with it).

    Args:
        distance: position of the key minus position of the query, integers.
        num_buckets: number of buckets, of both directions together.
        max_distance: all distances from this one on are in the last bucket.
        bidirectional: half of the buckets are for keys after the query; otherwise such keys are in bucket 0.
    """
    after = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        after = (distance > 0).long() * num_buckets
        steps = distance.abs()
    else:
        steps = (-distance).clamp_min(0)
    exact = num_buckets // 2
    # This order of the operations rounds so that a power of two falls into the bucket that begins with it.
    share = torch.log(steps.clamp_min(exact).float() / exact) / math.log(max_distance / exact)
    far = (exact + (share * (num_buckets - exact)).long()).clamp_max(num_buckets - 1)
    return after + torch.where(steps < exact, steps, far)


class RelativePositionBias(Embedding):
    """Table of a learned bias for each bucket of distances and each head.

    Args:
        num_buckets: see `relative_buckets`.
        num_heads: attention heads.
        max_distance: see `relative_buckets`.
        bidirectional: see `relative_buckets`.
    """

    def __init__(self, num_buckets: int, num_heads: int, *, max_distance: int, bidirectional: bool) -> None:
        super().__init__(num_buckets, num_heads)
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    def forward(self, positions: Tensor) -> Tensor:
        """Return the biases of attention among `positions` [length]: [heads, length, length]."""
        buckets = relative_buckets(
            positions[None, :] - positions[:, None],
            num_buckets=self.num_embeddings,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        return super().forward(buckets).permute(2, 0, 1)
