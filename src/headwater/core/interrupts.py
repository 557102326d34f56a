"""Ctrl-C waits until the code of this project has returned to the user's code.

[Note: interrupts]
Python raises `KeyboardInterrupt` in the main thread between any two instructions. In the middle of this
project's code it would leave a weight half bound, an update half applied or a lock held, and an error handler
could not repair this, because it can be interrupted too. A user of a notebook interrupts a cell and then
continues with the same model. So functions that change the state of a model are `uninterrupted`: the
exception is raised when the outermost of them returns, or when it calls the user's code by `interruptible`.
There it looks like an error in the user's code, after which a model is usable.

Only the usual handler of Python is replaced, and only inside these functions: a handler that the user or the
trainer has installed is called at once.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # the functions of `signal` need 13 µs, these 0.8 µs
import functools
import threading
import time
from _thread import get_ident
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from signal import SIGINT, default_int_handler
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

PATIENCE_S = 5.0
"""A second Ctrl-C that comes this many seconds after the first is raised at once: the code may be stuck."""

_OUTSIDE, _USER, _HELD = range(3)
"""Where the main thread is: outside of uninterrupted functions, in the user's code that one of them has
called, or in the code of this project."""


class _Interrupts:
    """The state of the main thread. Functions in other threads never get `KeyboardInterrupt`.

    Attributes:
        place: where the thread is.
        since: the time of a Ctrl-C that waits; `None` if none waits.
    """

    def __init__(self) -> None:
        self.main = threading.main_thread()
        self.place = _OUTSIDE
        self.since: float | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise `KeyboardInterrupt`, or remember it until the code of this project has returned."""
        if self.place == _HELD:
            now = time.monotonic()
            if self.since is None:
                self.since = now
            if now - self.since < PATIENCE_S:
                return
        self.since = None
        raise KeyboardInterrupt

    def enter(self) -> int:
        """Begin an uninterrupted function, and return where the thread was before."""
        before = self.place
        if before == _OUTSIDE and _signal.getsignal(SIGINT) is default_int_handler:
            _signal.signal(SIGINT, _handle)
        # This is last: an interrupt before it is raised, and `leave` is not called.
        self.place = _HELD
        return before

    def leave(self, before: int) -> None:
        """End the function; `before` is the result of `enter`. Raise the interrupt that has waited for it."""
        # This is first: an interrupt after it is raised, and nothing is left to be undone.
        self.place = before
        if before == _OUTSIDE and _signal.getsignal(SIGINT) is _handle:
            _signal.signal(SIGINT, default_int_handler)
        self.raise_waiting()

    def raise_waiting(self) -> None:
        """Raise the interrupt that waits, if one does."""
        if self.since is not None:
            self.since = None
            raise KeyboardInterrupt


_interrupts = _Interrupts()
_handle = _interrupts.handle  # one object, because handlers are compared by identity


def uninterrupted(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that Ctrl-C does not interrupt; see [Note: interrupts].

    If Ctrl-C was pressed meanwhile, `KeyboardInterrupt` is raised when the outermost such function returns.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _interrupts.place == _HELD or get_ident() != _interrupts.main.ident:
            return function(*args, **kwargs)
        before = _interrupts.enter()
        try:
            return function(*args, **kwargs)
        finally:
            _interrupts.leave(before)

    return run


def interruptible(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the user's code from an uninterrupted function. Ctrl-C interrupts it, also if pressed before."""
    if _interrupts.place != _HELD or get_ident() != _interrupts.main.ident:
        return function(*args, **kwargs)
    try:
        _interrupts.place = _USER
        _interrupts.raise_waiting()
        return function(*args, **kwargs)
    finally:
        _interrupts.place = _HELD


def uninterrupted_items(
    function: Callable[P, Generator[T, None, None]],
) -> Callable[P, Generator[T, None, None]]:
    """Decorate a generator function. Ctrl-C interrupts its caller, but not the code of the generator."""

    @functools.wraps(function)
    def items(*args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        return _Items(function(*args, **kwargs))

    return items


class _Items(Generator[T, None, None]):
    def __init__(self, items: Generator[T, None, None]) -> None:
        self._items = items

    @uninterrupted
    def send(self, value: None) -> T:
        return self._items.send(value)

    @uninterrupted
    def throw(self, *error: Any) -> T:
        return self._items.throw(*error)

    @uninterrupted
    def close(self) -> None:
        self._items.close()


class UninterruptedContext(AbstractContextManager[T]):
    """A context that Ctrl-C does not interrupt while it is entered and left, only in between."""

    def __init__(self, context: AbstractContextManager[T]) -> None:
        self._context = context

    @uninterrupted
    def __enter__(self) -> T:
        return self._context.__enter__()

    @uninterrupted
    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)
