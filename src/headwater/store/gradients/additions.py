"""Additions of gradients to sums while the device computes: on a thread, or later on the calling thread."""

from __future__ import annotations

import abc
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import final

from headwater.core.recorder import GRADIENT, RECORDER
from headwater.core.worker_pools import WorkerPool


class Additions(abc.ABC):
    """Interface: runs additions in the order of their submission."""

    @abc.abstractmethod
    def submit(self, add: Callable[[], None], num_bytes: int) -> None:
        """Run `add` after all additions submitted before.

        Args:
            add: the addition.
            num_bytes: bytes of its gradient.
        """

    @abc.abstractmethod
    def drain(self) -> None:
        """Block until the gradients that wait have no more bytes than the limit."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Block until all additions have ended. Raise what an addition has raised."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """Block until all additions have ended, and ignore their errors."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release threads. Additions that have not begun may be dropped."""


@final
class LaterAdditions(Additions):
    """Runs additions on the thread that calls `drain` or `finish`.

    With several ranks the sums are in host memory, and the thread that computes also adds. While additions
    wait here, the copies of their gradients from the device can end.

    Args:
        limit_bytes: `drain` runs additions while more bytes wait.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._waiting_bytes = 0

    def submit(self, add: Callable[[], None], num_bytes: int) -> None:
        self._waiting.append((add, num_bytes))
        self._waiting_bytes += num_bytes

    def drain(self) -> None:
        while self._waiting_bytes > self._limit_bytes:
            self._run_first()

    def finish(self) -> None:
        while self._waiting:
            self._run_first()

    def _run_first(self) -> None:
        add, num_bytes = self._waiting.popleft()
        self._waiting_bytes -= num_bytes
        _recorded(add, num_bytes)

    def abandon(self) -> None:
        while self._waiting:
            # The addition runs although its sum is not used, because the memory of its copy must live until
            # the copy is done.
            with contextlib.suppress(Exception):
                self._run_first()

    def close(self) -> None:
        self.abandon()


@final
class AdditionThread(Additions):
    """Runs additions on a thread, in the order of their submission. Counts the bytes of gradients that wait.

    Args:
        limit_bytes: if more bytes wait to be added, there is a backlog.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._thread = WorkerPool(1, "headwater-reduce")
        self._waiting: deque[tuple[Future[None], int]] = deque()  # additions, with the bytes of each gradient
        self._waiting_bytes = 0

    def submit(self, add: Callable[[], None], num_bytes: int) -> None:
        self._waiting.append((self._thread.submit(_recorded, add, num_bytes), num_bytes))
        self._waiting_bytes += num_bytes

    def is_backlogged(self) -> bool:
        """True if the gradients that wait to be added have more bytes than the limit.

        Raises what an addition that has ended has raised.
        """
        # Only the first additions can be done, because the thread works in this order.
        while self._waiting and self._waiting[0][0].done():
            self._finish_first()
        return self._waiting_bytes > self._limit_bytes

    def drain(self) -> None:
        while self.is_backlogged():
            self._finish_first()

    def finish(self) -> None:
        while self._waiting:
            self._finish_first()

    def _finish_first(self) -> None:
        addition, num_bytes = self._waiting[0]
        # The entry is removed after this wait: if an interrupt ends the wait, the gradient still counts.
        wait([addition])
        self._waiting.popleft()
        self._waiting_bytes -= num_bytes
        addition.result()

    def abandon(self) -> None:
        wait([addition for addition, _ in self._waiting])
        self._waiting.clear()
        self._waiting_bytes = 0

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


def _recorded(add: Callable[[], None], num_bytes: int) -> None:
    with RECORDER.span(GRADIENT, num_bytes=num_bytes):
        add()
