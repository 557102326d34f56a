"""Tensors that are made of pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from headwater.core.buffers import advise_huge_pages
from headwater.core.threads import one_core


def gather(pieces: Iterable[torch.Tensor], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a host tensor, in new memory, of all elements of `pieces` in their order.

    Args:
        pieces: host tensors. Each is copied before the next one is requested.
        shape: the shape of the result, which has as many elements.
        dtype: the dtype of the result.
    """
    values = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    advise_huge_pages(values)
    flat, count = values.view(-1), 0
    with torch.no_grad():
        for piece in pieces:
            # Not around the loop: the iterator may compute an update first.
            with one_core():
                flat[count : count + piece.numel()].copy_(piece.reshape(-1))
            count += piece.numel()
    assert count == flat.numel(), f"the pieces of a tensor of {flat.numel()} elements have {count}"
    return values
