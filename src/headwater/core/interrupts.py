"""Ctrl-C waits until the code of this project has returned to the user's code.

[Note: interrupts]
Python raises `KeyboardInterrupt` in the main thread when a function begins, when a call has returned, or when
a loop repeats. In the middle of this project's code it would leave a weight half bound, an update half
applied or a lock held, and an error handler could not repair this, because it can be interrupted too. A user
of a notebook interrupts a cell and then continues with the same model. So functions that change the state of
a model are `uninterrupted`: the exception is raised when the outermost of them returns, or when it calls the
user's code by `interruptible`. There it is like an error in the user's code, after which a model is usable.

Only the usual handler of Python is replaced, and only inside these functions. A handler that the user or the
trainer has installed is called at once.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # the functions of `signal` need 13 µs, these 0.8 µs
import functools
import os
import threading
import time
from _thread import get_ident
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, suppress
from signal import SIGINT, default_int_handler
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

PATIENCE_S = 5.0
"""A Ctrl-C that comes this many seconds after the first is raised at once: the code may be stuck."""

_OUTSIDE, _USER, _HELD = range(3)
"""Where the main thread is: outside of uninterrupted functions, in the user's code that one of them has
called, or in the code of this project."""


class _Interrupts:
    """The state of the main thread. Functions in other threads never get `KeyboardInterrupt`.

    Attributes:
        main: the main thread.
        place: where it is.
        since: the time of a Ctrl-C that waits; `None` if none waits.
        holds_user_code: true if the user's code is not interrupted either.
    """

    def __init__(self) -> None:
        self.main = threading.main_thread()
        self.holds_user_code = False
        self.place = _OUTSIDE
        self.since: float | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise `KeyboardInterrupt`, or remember it until the code of this project has returned."""
        if self.place == _HELD:
            now = time.monotonic()
            if self.since is None:
                self.since = now
                return
            left = self.since + PATIENCE_S - now
            if left > 0:
                _say(
                    "headwater stops when the current operation is complete; to stop without waiting, press "
                    f"Ctrl-C again after {left:.0f} s"
                )
                return
        elif self.place == _OUTSIDE and _signal.getsignal(SIGINT) is _handle:
            # `enter` or `leave` was interrupted, or an earlier interrupt still waits.
            _signal.signal(SIGINT, default_int_handler)
        self.since = None
        raise KeyboardInterrupt

    def enter(self) -> int:
        """Begin an uninterrupted function, and return where the thread was before."""
        before = self.place
        if before == _OUTSIDE and _signal.getsignal(SIGINT) is default_int_handler:
            _signal.signal(SIGINT, _handle)
        # This statement is last: an interrupt that comes earlier is raised here, and `leave` is not called.
        self.place = _HELD
        return before

    def leave(self, before: int, *, raises: bool = True) -> None:
        """End the function, and raise the interrupt that has waited for it.

        Args:
            before: the result of `enter`.
            raises: false if the interrupt is to wait for the next uninterrupted function.
        """
        # This statement is first: an interrupt that comes later is raised here, and nothing is left to undo.
        self.place = before
        waits = self.since is not None and not raises
        # While an interrupt waits, `_handle` stays installed. If another interrupt is raised first, `_handle`
        # clears `since`; Python's default handler would not, and the old interrupt would be raised as well.
        if before == _OUTSIDE and not waits and _signal.getsignal(SIGINT) is _handle:
            _signal.signal(SIGINT, default_int_handler)
        if raises:
            self.raise_waiting()

    def raise_waiting(self) -> None:
        """Raise the interrupt that waits, if one does."""
        if self.since is not None:
            self.since = None
            raise KeyboardInterrupt

    def begin_fork(self) -> None:
        """Reset the state in a forked child. The parent's main thread may be in an uninterrupted function."""
        self.main, self.place, self.since = threading.main_thread(), _OUTSIDE, None
        self.holds_user_code = False
        if _signal.getsignal(SIGINT) is _handle:
            _signal.signal(SIGINT, default_int_handler)


_interrupts = _Interrupts()
_handle = _interrupts.handle  # one object, because handlers are compared by identity
os.register_at_fork(after_in_child=_interrupts.begin_fork)


def _say(text: str) -> None:
    # Not `print`: the signal may have interrupted a write to the same stream, which is not reentrant.
    with suppress(OSError):  # the terminal may be closed
        os.write(2, f"\n{text}\n".encode())


def uninterrupted(function: Callable[P, R], *, raises: bool = True) -> Callable[P, R]:
    """Decorate a function that Ctrl-C does not interrupt; see [Note: interrupts].

    If Ctrl-C was pressed meanwhile, `KeyboardInterrupt` is raised when the outermost such function returns.

    Args:
        function: the function.
        raises: false to raise it only when the next such function returns, which completes the work of this
            one.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _interrupts.place == _HELD or get_ident() != _interrupts.main.ident:
            return function(*args, **kwargs)
        before = _interrupts.enter()
        try:
            result = function(*args, **kwargs)
        except BaseException:  # of any kind: no later function completes the work, so `raises` has no effect
            _interrupts.leave(before)
            raise
        _interrupts.leave(before, raises=raises)
        return result

    return run


def interruptible(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call the user's code from an uninterrupted function. Ctrl-C interrupts it, also if pressed before."""
    if _interrupts.place != _HELD or _interrupts.holds_user_code or get_ident() != _interrupts.main.ident:
        return function(*args, **kwargs)
    try:
        _interrupts.place = _USER
        _interrupts.raise_waiting()
        return function(*args, **kwargs)
    finally:
        _interrupts.place = _HELD


def held_throughout(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function that Ctrl-C does not interrupt, not even in the user's code that it calls.

    With fake tensors torch calls Python from C++ functions that cannot raise an exception: there
    `KeyboardInterrupt` would end the process.
    """
    if get_ident() != _interrupts.main.ident:
        return function(*args, **kwargs)

    @uninterrupted
    def run() -> R:
        before, _interrupts.holds_user_code = _interrupts.holds_user_code, True
        try:
            return function(*args, **kwargs)
        finally:
            _interrupts.holds_user_code = before

    return run()


def _begun(begin: Callable[[], R], end: Callable[[], object]) -> R:
    """Return `begin()`, uninterrupted. If Ctrl-C was pressed meanwhile, call `end()` and raise the exception.

    Python does not leave a context whose `__enter__` has raised, nor close a generator after an exception in
    the call that returned an item. So this function ends them.
    """
    begun: list[R] = []
    try:
        uninterrupted(lambda: begun.append(begin()))()
    except KeyboardInterrupt:
        if begun:
            uninterrupted(end)()
        raise
    return begun[0]


def uninterrupted_items(
    function: Callable[P, Generator[T, None, None]],
) -> Callable[P, Generator[T, None, None]]:
    """Decorate a generator function. Ctrl-C interrupts its caller, but not the code of the generator."""

    @functools.wraps(function)
    def items(*args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        return _Items(function(*args, **kwargs))

    return items


class _Items(Generator[T, None, None]):
    """A generator that is closed if Ctrl-C was pressed while it computed an item."""

    def __init__(self, items: Generator[T, None, None]) -> None:
        self._items = items

    def send(self, value: None) -> T:
        return _begun(lambda: self._items.send(value), self._items.close)

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

    def __enter__(self) -> T:
        error = KeyboardInterrupt()
        return _begun(self._context.__enter__, lambda: self._context.__exit__(type(error), error, None))

    @uninterrupted
    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)
