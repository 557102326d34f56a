"""Values of tensors: copies to undo changes in place, and bytes as a tensor of a dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

OF_DTYPE = frozenset({
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.itemsize.__get__,  # type: ignore[attr-defined]
    torch.Tensor.nbytes.__get__,  # type: ignore[attr-defined]
    torch.Tensor.element_size,
})  # fmt: skip
"""Functions of torch that tell the dtype of their argument or the size of an element."""


def in_dtype(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as a tensor of `dtype`: a view if they are aligned for it, otherwise a copy."""
    return (data.clone() if data.storage_offset() % dtype.itemsize else data).view(dtype)


def may_change(tensor: torch.Tensor) -> bool:
    """True if a forward may change a tensor in place, and a copy can restore its values."""
    return not (
        isinstance(tensor, nn.Parameter)
        or tensor.requires_grad
        or tensor.is_inference()
        or tensor.is_nested
        or tensor.layout is not torch.strided
    )


def copies_of(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each different tensor with a copy of its values."""
    return [(tensor, tensor.clone()) for tensor in {id(tensor): tensor for tensor in tensors}.values()]


@torch.no_grad()
def put_back(values: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Restore the values of tensors without a change of their version counters, so that autograd sees none.

    The values of a second run are those of the first, so a tensor that autograd has saved for another
    backward is as it was.

    Args:
        values: tensors with their copies.
    """
    for tensor, value in values:
        if not torch.equal(tensor, value):
            version = tensor._version
            if tensor.shape != value.shape:
                tensor.resize_(value.shape)  # the forward has resized it in place
            tensor.copy_(value)
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
