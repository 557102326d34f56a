"""Results of a traced step: tensors for closures to read, which warn if they are read elsewhere."""

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
from headwater.core.process_value import ProcessValue
from headwater.core.trees import map_tensors

_READS = {
    torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__,
    torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__complex__,
    torch.Tensor.__index__, torch.Tensor.__contains__, torch.Tensor.__repr__, torch.Tensor.__format__,
    torch.Tensor.is_nonzero, torch.Tensor.equal, torch.Tensor.allclose,
    torch.is_nonzero, torch.equal, torch.allclose,
}  # fmt: skip
"""Tensor functions that need values in host memory, such as `item`."""

_UNTRACED = {torch.Tensor.__reduce_ex__, torch.Tensor.__deepcopy__}
"""Tensor functions that get a plain tensor, so that a pickle can be loaded without this module."""

_reading_is_free: ContextVar[bool] = ContextVar("_reading_is_free", default=False)
_has_warned = ProcessValue(False)
"""True after the warning was given. Global: it is given once for all tensors."""


class TracedValueWarning(UserWarning):
    """Warns that a value of a step was read outside a closure, so that the program waited for the device."""


class TracedValue(torch.Tensor):
    """A result of a traced step: detached from its graph, and an ordinary tensor in arithmetic.

    Step closures read its value (`item`, `float`, `print`, `if`, …). Elsewhere reading works too: the program
    waits for the device, and the first such read gives a warning that says what to write instead.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward and not args[0].requires_grad:
            raise StreamError(
                "backward was called on the result of a traced step, which has no autograd graph",
                where="backward",
                remedy="call backward within the traced function",
            )
        if func in _READS:
            _warn_once(func.__name__)
        elif func not in _UNTRACED:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        # `value` makes plain tensors: the results belong to the caller, and reading them never warns.
        value = _read if func in _READS else untraced
        return func(*map_tensors(value, args), **map_tensors(value, kwargs))


def traced(value: torch.Tensor) -> TracedValue:
    """Return a `TracedValue` of a tensor: detached, in the same memory."""
    return value.detach().as_subclass(TracedValue)


def _read(value: torch.Tensor) -> torch.Tensor:
    """Return a traced value as a plain tensor of the whole batch, and any other tensor unchanged."""
    return whole(untraced(value)) if isinstance(value, TracedValue) else value


def untraced(value: torch.Tensor) -> torch.Tensor:
    """Return a traced value as a plain tensor, and any other tensor unchanged."""
    return value.as_subclass(torch.Tensor) if isinstance(value, TracedValue) else value


@contextmanager
def reading_is_free() -> Iterator[None]:
    """Enter a context in which traced values may be read without a warning."""
    token = _reading_is_free.set(True)
    try:
        yield
    finally:
        _reading_is_free.reset(token)


def _warn_once(read: str) -> None:
    if _has_warned.value or _reading_is_free.get():
        return
    _has_warned.value = True
    warnings.warn(
        f"{read}: the value of a traced step is read outside a closure, and the loop waits for the device; "
        "write a function decorated with step_closure that takes the value, and read it there (this warning "
        "is given once)",
        TracedValueWarning,
        stacklevel=_depth_of_caller(),
    )


def _depth_of_caller() -> int:
    """Return the stack level, seen from `_warn_once`, of the first caller outside of torch and this file."""
    inside = (str(Path(torch.__file__).parent), __file__)
    depth = 1
    # At most 20 levels: a warning at a wrong line is better than a walk through a deep stack.
    while depth < 20 and sys._getframe(depth + 1).f_code.co_filename.startswith(inside):
        depth += 1
    return depth + 1
