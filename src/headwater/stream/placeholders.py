"""Placeholders of tensors whose values are elsewhere, and the torch functions that need no values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

_VALUE_ATTRIBUTES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_METADATA = frozenset({
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel, torch.Tensor.nelement,
    torch.Tensor.element_size, torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.get_device,
    torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.is_signed,
    torch.Tensor.is_contiguous, torch.Tensor.is_shared, torch.Tensor.is_pinned,
    torch.Tensor.__len__, torch.Tensor.__hash__, torch.Tensor.requires_grad_, torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.is_floating_point, torch.is_complex, torch.numel,
})  # fmt: skip

DATA: Any = torch.Tensor.data
"""The attribute `data`; its getter and setter are functions that `__torch_function__` sees."""

LAYOUT = frozenset({torch.Tensor.stride, torch.Tensor.is_contiguous, torch.Tensor.storage_offset})
"""Functions that depend on strides and on the offset in memory.

They run on `meta`, because the placeholder of a tensor at rest is one expanded element.
"""

BY_IDENTITY = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})
"""Functions that identify tensors in an autograd graph and do not read their values."""

T = TypeVar("T", bound=torch.Tensor)


def is_metadata(func: Any) -> bool:
    """True if a torch function needs only metadata of a tensor (shape, dtype, …), not its values."""
    if func in _METADATA:
        return True
    is_attribute = getattr(func, "__name__", "") in ("__get__", "__set__")
    return is_attribute and getattr(func.__self__, "__name__", "") not in _VALUE_ATTRIBUTES


def without_values(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor in the memory of one element: NaN, or 0 if the dtype is an integer or bool."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(tuple(shape))


def stand_in(kind: type[T], shape: Sequence[int], like: torch.Tensor) -> T:
    """Return a placeholder of class `kind`.

    Args:
        kind: the class.
        shape: the shape.
        like: a tensor with the dtype and the device.
    """
    found: Any = without_values(shape, like.dtype, like.device)
    found.__class__ = kind  # `as_subclass` would make torch call `__torch_dispatch__` for each operation
    placeholder: T = found
    return placeholder


class NotTraced(torch.Tensor):
    """A tensor whose operations `torch.compile` leaves out of its graphs.

    `torch.compile` takes a tensor of a class with its own `__torch_dispatch__` as a plain object. So it runs
    an operation on such a tensor as without compilation. Otherwise it would read the placeholder's memory.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation as torch does."""
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))
