"""Sparse gradients: sparse tensors (COO) with values for some rows of a parameter, zero elsewhere.

They stay as autograd made them, not coalesced: plain PyTorch adds their entries to a weight one by one, and
the order decides the last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_UNCHECKED: Any = torch.ops.aten._sparse_coo_tensor_unsafe.default


def add(total: torch.Tensor, gradient: torch.Tensor, *, in_place: bool) -> torch.Tensor:
    """Return the sum of two gradients, as autograd adds them. May change `total` in place if `in_place`.

    Args:
        total: the sum until now.
        gradient: the gradient that is added; dense or sparse.
        in_place: true if `total` may be changed.
    """
    if total.is_sparse and not gradient.is_sparse:
        # In this order: torch can add a sparse tensor to a dense one, but not the reverse.
        return gradient + total
    return total.add_(gradient) if in_place else total + gradient


def rows_of(gradient: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the part of a sparse gradient for rows `start` to `stop`, with its entries in the same order.

    Args:
        gradient: sparse, not necessarily coalesced.
        start: the first row.
        stop: one past the last row.

    Returns:
        A sparse tensor of `stop - start` rows.
    """
    if (start, stop) == (0, gradient.shape[0]):
        return gradient
    indices, values = gradient._indices(), gradient._values()
    inside = (indices[0] >= start) & (indices[0] < stop)
    # Indexing with a mask copies, so the subtraction does not change the gradient.
    own = indices[:, inside]
    own[0] -= start
    shape = (stop - start, *gradient.shape[1:])
    return _sparse(own, values[inside], shape, coalesced=gradient.is_coalesced())


def with_values(gradient: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a coalesced sparse gradient with the same indices and new values."""
    return _sparse(gradient.indices(), values, gradient.shape, coalesced=True)


def _sparse(
    indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int], *, coalesced: bool
) -> torch.Tensor:
    """Return a sparse tensor, as autograd makes them."""
    # `torch.sparse_coo_tensor` changes a setting of the process if told not to check its arguments, and
    # torch 2.11 warns that they are not checked.
    made: torch.Tensor = _UNCHECKED(
        indices, values, shape, dtype=values.dtype, layout=torch.sparse_coo, is_coalesced=coalesced
    )
    return made
