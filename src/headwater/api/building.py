"""Construction of a model that is larger than host memory: its large tensors are in files.

The constructor initialises the parameters in the usual order and with the usual random numbers. Only the
memory of the parameters differs: it is a mapped file without a name. Written pages are removed from the
process from time to time, so that its resident memory stays small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from headwater.core.file_memory import FILE_PAGES, LARGE_BYTES

_Fill = Callable[[torch.Tensor, tuple[Any, ...]], torch.Tensor]
_FACTORIES: dict[Any, _Fill] = {
    torch.empty: lambda tensor, args: tensor,
    torch.zeros: lambda tensor, args: tensor.zero_(),
    torch.ones: lambda tensor, args: tensor.fill_(1),
    torch.full: lambda tensor, args: tensor.fill_(args[1]),
    torch.rand: lambda tensor, args: tensor.uniform_(),
    torch.randn: lambda tensor, args: tensor.normal_(),
}
"""Factory function -> a function that fills new memory as the factory does, given the factory's arguments."""


class BuildInFiles(TorchFunctionMode):
    """A context in which `torch.empty` and similar functions allocate large CPU tensors in files.

    Args:
        folder: folder of the files; created if missing. The files have no names, and are removed with their
            tensors.

    Raises:
        DiskFullError: if a file does not fit.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._in_host_memory = ExitStack()

    def __enter__(self) -> Self:
        # The user may have set another default device for the whole script.
        self._in_host_memory.enter_context(torch.device("cpu"))
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._in_host_memory.close()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        shape = _shape_in_file(func, args, kwargs)
        if shape is None:
            result = func(*args, **kwargs)
        else:
            dtype = _dtype(func, args, kwargs)
            tensor = _FACTORIES[func](FILE_PAGES.allocate(self._folder, shape, dtype), args)
            result = tensor.requires_grad_(bool(kwargs.get("requires_grad", False)))
        if isinstance(result, torch.Tensor) and (shape is not None or _is_in_place(func)):
            FILE_PAGES.count_written(result.nbytes)
        return result


def _shape_in_file(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of the tensor that a call creates; `None` if its memory need not be in a file."""
    if func not in _FACTORIES or kwargs.keys() - {"dtype", "device", "requires_grad", "size", "layout"}:
        return None
    if torch.device(kwargs.get("device") or torch.get_default_device()).type != "cpu":
        return None
    sizes = kwargs.get("size", args[:1] if func is torch.full else args)
    flat = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    shape = tuple(int(size) for size in flat)
    dtype = _dtype(func, args, kwargs)
    return shape if math.prod(shape) * dtype.itemsize >= LARGE_BYTES else None


def _dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """Return the dtype of the tensor that a call creates."""
    asked: torch.dtype | None = kwargs.get("dtype")
    if asked is not None:
        return asked
    # `full` takes the dtype of the value: int64 for 1, bool for True.
    return torch.full((), args[1], device="cpu").dtype if func is torch.full else torch.get_default_dtype()


def _is_in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")
