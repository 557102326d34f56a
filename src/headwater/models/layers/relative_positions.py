"""Biases of attention by the distance of two tokens, learned (arXiv:1910.10683, section 2.1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwater.models.layers.linear import Embedding


def relative_buckets(distance: Tensor, *, num_buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The bucket of each distance: int64, of the same shape.

    Half of the buckets of a direction are for one distance each, from 0 on. The others divide the distances
    up to `max_distance` evenly in their logarithms; the last is for all beyond, too (arXiv:1910.10683,
    section 2.1, and the code published with it).

    Args:
        distance: position of the key minus that of the query, integers.
        num_buckets: of both directions together.
        max_distance: distance from which on all are alike.
        bidirectional: half of the buckets are for keys after the query; otherwise these are in the first.
    """
    after = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        after = (distance > 0).long() * num_buckets
        steps = distance.abs()
    else:
        steps = (-distance).clamp_min(0)
    exact = num_buckets // 2
    # The product is in this order so that powers of two fall into the bucket that they begin.
    share = torch.log(steps.clamp_min(exact).float() / exact) / math.log(max_distance / exact)
    far = (exact + (share * (num_buckets - exact)).long()).clamp_max(num_buckets - 1)
    return after + torch.where(steps < exact, steps, far)


class RelativePositionBias(Embedding):
    """A bias for each bucket of distances and each head.

    Args:
        num_buckets: see `relative_buckets`.
        num_heads: heads.
        max_distance: see `relative_buckets`.
        bidirectional: likewise.
    """

    def __init__(self, num_buckets: int, num_heads: int, *, max_distance: int, bidirectional: bool) -> None:
        super().__init__(num_buckets, num_heads)
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    def forward(self, positions: Tensor) -> Tensor:
        """What is added to the scores of `positions` [length] among each other: [heads, length, length]."""
        buckets = relative_buckets(
            positions[None, :] - positions[:, None],
            num_buckets=self.num_embeddings,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        return super().forward(buckets).permute(2, 0, 1)
