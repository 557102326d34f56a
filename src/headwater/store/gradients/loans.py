"""Tells whether a user's loop can still reach the memory of a gradient."""

from __future__ import annotations

import torch


def is_used_elsewhere(gradient: torch.Tensor | None) -> bool:
    """True if another tensor, such as a view that the loop keeps, has the memory of a dense gradient."""
    if gradient is None or gradient.layout is not torch.strided:
        return False
    return _references(gradient) > _OWN_REFERENCES


def _references(tensor: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


_OWN_REFERENCES = _references(torch.empty(0))
"""References to the memory of a tensor that no other tensor shares."""
