"""Modes of torch that change how operators are computed: transforms of functions, and autocast."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """True within transforms of `torch.func` and forward derivatives, which the package's kernels lack."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


# torch.compile evaluates the function once and does not look inside. This is all that
# `torch.compiler.assume_constant_result` does, which needs the compiler, and a second to import it.
is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of autocast; `None` outside of autocast, and on devices without it, such as meta."""
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else None


def cast(tensor: Tensor, autocast: torch.dtype | None) -> Tensor:
    """Return a tensor as autocast passes it to a matrix product. It leaves fp64 and integers as they are."""
    stays = autocast is None or tensor.dtype == torch.float64 or not tensor.is_floating_point()
    return tensor if stays else tensor.to(autocast)
