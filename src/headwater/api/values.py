"""What a traced step returns: tensors for closures to read, which say so when something else does."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from headwater.api.ranks import whole
from headwater.core.errors import StreamError
from headwater.core.trees import map_tensors

_READS = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__,
    torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__complex__,
    torch.Tensor.__index__, torch.Tensor.__contains__, torch.Tensor.__repr__, torch.Tensor.__format__,
    torch.Tensor.is_nonzero, torch.Tensor.equal, torch.Tensor.allclose,
    torch.is_nonzero, torch.equal, torch.allclose,
}  # fmt: skip
"""What needs a tensor's values on the host."""

_UNTRACED = {torch.Tensor.__reduce_ex__, torch.Tensor.__deepcopy__}
"""What should see a plain tensor: files must not need this module to be read."""

_reading_is_free: ContextVar[bool] = ContextVar("_reading_is_free", default=False)
_has_warned = False


class TracedValueWarning(UserWarning):
    """A value of a step was read outside a closure, so that the program waited for it."""


class TracedValue(torch.Tensor):
    """A result of a traced step: detached from its graph, and an ordinary tensor in arithmetic.

    Reading its value (`item`, `float`, `print`, `if`, …) is for step closures. Elsewhere it works too: the
    program waits for the device, and is told once what to write instead.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward and not args[0].requires_grad:
            raise StreamError(
                "the result of a traced step has no graph", remedy="call backward within the traced function"
            )
        if func in _READS:
            _warn_once(func.__name__)
        elif func not in _UNTRACED:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        value = _read if func in _READS else untraced
        return func(*map_tensors(value, args), **map_tensors(value, kwargs))


def traced(value: torch.Tensor) -> TracedValue:
    """The tensor as a result of a step: same memory, no graph."""
    return value.detach().as_subclass(TracedValue)


def _read(value: torch.Tensor) -> torch.Tensor:
    """The plain tensor, of the whole batch, that a traced value is; other tensors as they are."""
    return whole(untraced(value)) if isinstance(value, TracedValue) else value


def untraced(value: torch.Tensor) -> torch.Tensor:
    """The plain tensor that a traced value is; other tensors as they are."""
    return value.as_subclass(torch.Tensor) if isinstance(value, TracedValue) else value


@contextmanager
def reading_is_free() -> Iterator[None]:
    """Within it traced values are read without a warning: the values are known."""
    token = _reading_is_free.set(True)
    try:
        yield
    finally:
        _reading_is_free.reset(token)


def _warn_once(read: str) -> None:
    global _has_warned
    if _has_warned or _reading_is_free.get():
        return
    _has_warned = True
    warnings.warn(
        f"{read}: the value of a traced step is read outside a closure, and the loop waits for the device; "
        "write a function decorated with step_closure that takes the value, and read it there (said once)",
        TracedValueWarning,
        stacklevel=_depth_of_caller(),
    )


def _depth_of_caller() -> int:
    """How many frames above `_warn_once` the first one lies that is neither torch's nor of this file."""
    inside = (str(Path(torch.__file__).parent), __file__)
    depth = 1
    while depth < 20 and sys._getframe(depth + 1).f_code.co_filename.startswith(inside):
        depth += 1
    return depth + 1
