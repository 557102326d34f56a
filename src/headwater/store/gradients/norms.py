"""Norms of gradients, as `torch.nn.utils.get_total_norm` takes them."""

from __future__ import annotations

import torch

from headwater.store.layout import PIECE_ELEMENTS

NARROW = (torch.bfloat16, torch.float16)
"""Dtypes whose sums and norms are computed in a wider dtype."""


def gradient_norm(gradient: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm, in fp32 or wider. A narrow gradient is widened piece by piece."""
    if gradient.is_sparse:
        # Entries of one element are added first.
        gradient = gradient.coalesce().values()
    if gradient.dtype not in NARROW:
        whole: torch.Tensor = torch.linalg.vector_norm(gradient)
        return whole
    if gradient.is_cuda:  # its kernel widens each element as it reads it
        widened: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        return widened
    # The norm is computed in pieces: an fp32 copy of a whole gradient would take twice its memory.
    pieces = gradient.reshape(-1).split(PIECE_ELEMENTS)
    norms = torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float32) for piece in pieces])
    combined: torch.Tensor = torch.linalg.vector_norm(norms)
    return combined
