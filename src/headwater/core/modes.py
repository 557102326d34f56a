"""Modes that change how operators compute: transforms of functions, autocast, products in 16 bits."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch as dispatch

_DEVICES = ("cpu", "cuda")

_EVERYWHERE = threading.Event()
"""Set once threads outside of the context `half_kernels` use the products of `core/half_products.py`."""


class _Thread(threading.local):
    """The argument of the context `half_kernels` in which a thread is; `None` outside of such contexts."""

    converted: bool | None = None


_THREAD = _Thread()

_OF_TRANSFORMS = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode).add(
    torch._C.DispatchKey.FuncTorchDynamicLayerBackMode
)
"""Dispatch keys through which `torch.func` intercepts all operators. If they are off, it wraps no tensors."""


def is_transformed() -> bool:
    """True inside transforms of `torch.func` and forward-mode AD, which our kernels do not support."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


# This makes `torch.compile` call the function once, and use the result as a constant. The function
# `torch.compiler.assume_constant_result` sets the same attribute, but takes a second to import the compiler.
is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype of autocast; `None` outside of autocast, and on devices without it, such as meta."""
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else None


def cast(tensor: Tensor, autocast: torch.dtype | None) -> Tensor:
    """Return a tensor as autocast passes it to a matrix product. It leaves fp64 and integers as they are."""
    stays = autocast is None or tensor.dtype == torch.float64 or not tensor.is_floating_point()
    return tensor if stays else tensor.to(autocast)


def present_autocast() -> dict[str, torch.dtype]:
    """Return the types of devices for which autocast is on, each with its dtype."""
    found = {device: autocast_dtype(device) for device in _DEVICES}
    return {device: dtype for device, dtype in found.items() if dtype is not None}


@contextmanager
def only_autocast(dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Enter a context with this autocast, whatever autocast is on now.

    Args:
        dtypes: type of a device -> the dtype of its autocast; it is off for other devices.
    """
    with ExitStack() as stack:
        for device in _DEVICES:
            dtype = dtypes.get(device)
            if dtype != autocast_dtype(device):
                autocast = torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False)
                stack.enter_context(autocast)
        yield


@contextmanager
def apart_from_modes() -> Iterator[None]:
    """Enter a context without the caller's autocast, modes, transforms of `torch.func` and inference mode.

    Products in half precision are those outside of the contexts `half_kernels`. A forward that needs a stage
    makes the store update it first. The context around this forward must not change what the optimizer
    computes, because other threads run updates too.
    """
    with (
        torch._C._ExcludeDispatchKeyGuard(_OF_TRANSFORMS),
        dispatch._disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.inference_mode(False),
        only_autocast({}),
        half_kernels(converted=None),
    ):
        yield


@contextmanager
def half_kernels(*, converted: bool | None) -> Iterator[None]:
    """Enter a context that decides by which kernels this thread multiplies bf16 and fp16.

    Args:
        converted: true for the products of `core/half_products.py`, once it has replaced torch's kernels;
            false for torch's; `None` for those that threads outside of such contexts use.
    """
    before, _THREAD.converted = _THREAD.converted, converted
    try:
        yield
    finally:
        _THREAD.converted = before


def convert_everywhere() -> None:
    """Make threads outside of the context `half_kernels` use the products of `core/half_products.py`."""
    _EVERYWHERE.set()


def converts_half_products() -> bool:
    """True if this thread uses the products of `core/half_products.py` where torch's are slow."""
    return _EVERYWHERE.is_set() if _THREAD.converted is None else _THREAD.converted
