"""Batches whose sequences end with padding."""

from __future__ import annotations

import torch
from torch import Tensor


def text_mask(sequences: int, length: int, share: float) -> Tensor:
    """Return a mask that is true for text and false for the padding after it, [sequences, length].

    The first sequence has no padding and the last one twice the mean.

    Args:
        sequences: number of sequences.
        length: positions of each sequence.
        share: mean share of positions that are padding, below 0.5.
    """
    shares = torch.linspace(0, 2 * share, sequences) if sequences > 1 else torch.tensor([share])
    lengths = ((1 - shares) * length).round().clamp_min(1)
    return torch.arange(length) < lengths[:, None]
