"""The thread that adds gradients to sums while the device computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

from headwater.core.recorder import GRADIENT, RECORDER


@final
class AdditionThread:
    """Runs additions on a thread, in the order of their submission. Counts the bytes of gradients that wait.

    Args:
        limit_bytes: gradients beyond this count as a backlog.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headwater-reduce")
        self._waiting: deque[tuple[Future[None], int]] = deque()  # with the bytes of the gradient
        self._waiting_bytes = 0

    def submit(self, add: Callable[[], None], num_bytes: int) -> None:
        """Run `add` on the thread, after all additions submitted before."""
        self._waiting.append((self._thread.submit(_recorded, add, num_bytes), num_bytes))
        self._waiting_bytes += num_bytes

    def is_backlogged(self) -> bool:
        """True if the gradients that wait to be added have more bytes than the limit.

        Raises what an addition that has ended has raised.
        """
        # Only the first ones: the thread works in this order.
        while self._waiting and self._waiting[0][0].done():
            self._finish_first()
        return self._waiting_bytes > self._limit_bytes

    def drain(self) -> None:
        """Block until `is_backlogged` is false."""
        while self.is_backlogged():
            self._finish_first()

    def finish(self) -> None:
        """Block until all additions have ended."""
        while self._waiting:
            self._finish_first()

    def _finish_first(self) -> None:
        addition, num_bytes = self._waiting.popleft()
        addition.result()
        # After `result`: a gradient counts until it is added.
        self._waiting_bytes -= num_bytes

    def close(self) -> None:
        """End the thread. Additions that have not begun are dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _recorded(add: Callable[[], None], num_bytes: int) -> None:
    with RECORDER.span(GRADIENT, num_bytes=num_bytes):
        add()
