"""Handling of Ctrl-C, SIGTERM and the end of the terminal: the first asks a run to stop after its step.

The second exits at once.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import TypeVar

from headwater.core.exit_codes import INTERRUPTED
from headwater.core.safe_path import safe_path
from headwater.core.signals import Handler, handled, speaks_for_all

Item = TypeVar("Item")


class Interrupt:
    """A request to stop the run.

    Attributes:
        requested: True if the run should stop as soon as its step is complete.
        hung_up: True if the terminal was closed.

    Args:
        last_checkpoint: returns the last complete checkpoint; `None` before the first one.
    """

    def __init__(self, last_checkpoint: Callable[[], Path | None] = lambda: None) -> None:
        self._last_checkpoint = last_checkpoint
        self.requested = False  # set by a signal here, or when another rank got one
        self.hung_up = False
        self._heard = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: request a stop; the second time, exit at once."""
        # `requested` does not count signals: other ranks and the memory watch set it too.
        if self._heard:
            last = self._last_checkpoint()
            _say(
                "stopped; the run has no checkpoint" if last is None else f"stopped; {last.name} is complete"
            )
            os._exit(INTERRUPTED)
        self._heard = self.requested = True
        _say("stopping after this step; repeat the signal to stop at once")

    def handle_hangup(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGHUP: request a stop. A second SIGHUP has no further effect.

        When a terminal closes, both the kernel and the shell send the signal.
        """
        self.requested = self.hung_up = True


def _say(text: str) -> None:
    """Print a message on rank 0 only."""
    if not speaks_for_all():
        return
    # A signal may interrupt a write to stderr, and a buffered stream cannot begin a write within a write. So
    # this writes to the descriptor.
    with suppress(OSError):  # the terminal may be closed
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{text}\n".encode())


@contextmanager
def interrupts(last_checkpoint: Callable[[], Path | None] = lambda: None) -> Iterator[Interrupt]:
    """Turn SIGINT, SIGTERM and SIGHUP into requests to stop. Outside of the main thread this does nothing.

    SIGHUP, which comes when the terminal closes, stays ignored if it is (`nohup`).

    Args:
        last_checkpoint: returns the last complete checkpoint; the message of a second signal names it.
    """
    interrupt = Interrupt(last_checkpoint)
    handlers: dict[int, Handler] = dict.fromkeys((signal.SIGINT, signal.SIGTERM), interrupt.handle)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        handlers[signal.SIGHUP] = interrupt.handle_hangup
    try:
        with handled(handlers):
            yield interrupt
    finally:
        if interrupt.hung_up:
            # The shell may send the signal again while the process ends.
            signal.signal(signal.SIGHUP, signal.SIG_IGN)


def shielded(items: Iterable[Item]) -> Iterator[Item]:
    """Yield `items`. Worker processes that start when the first item is requested ignore Ctrl-C.

    A terminal sends the signal to every process of the job. A new process inherits which signals are blocked,
    so the signal is blocked while the workers are started: at the latest when the first item is requested.
    """
    with safe_path():  # started now, as multiprocessing would start it later and unblock the signal
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        iterator = iter(items)
        first = list(itertools.islice(iterator, 1))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    yield from first
    yield from iterator
