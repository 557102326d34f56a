"""The jobs of the queue, for the page: their list, and the actions of the user."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import final

from headwater.appliance.queue import Queue
from headwater.appliance.types import read_priority
from headwater.board.content import Document, job_rows
from headwater.core.errors import HeadwaterError
from headwater.core.users import user_name

_MAX_AGE_S = 1.0


@final
class Jobs:
    """The jobs of a queue. All calls of the queue run on one thread, because a queue belongs to a thread.

    Args:
        open_queue: opens the queue; called on that thread at the first use.
    """

    def __init__(self, open_queue: Callable[[], Queue]) -> None:
        self._open_queue = open_queue
        self._queue: Queue | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headwater-board-jobs")
        self._listed = -_MAX_AGE_S
        self._document: Document = {}

    def document(self) -> Document:
        """Return the jobs, at most a second old: `rows`, or `error` if the queue does not answer."""
        return self._thread.submit(self._list).result()

    def cancel(self, name: str) -> Document:
        """Ask a job to end and return the list of jobs.

        Raises:
            QueueError: if the job has ended, does not exist, or belongs to another user.
        """
        return self._change(lambda queue: queue.cancel(name))

    def set_priority(self, name: str, priority: str) -> Document:
        """Change the priority of a waiting job and return the list of jobs.

        Raises:
            ConfigError: if the priority is unknown.
            QueueError: if the job does not wait, does not exist, or belongs to another user.
        """
        chosen = read_priority(priority)
        return self._change(lambda queue: queue.set_priority(name, chosen))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _change(self, action: Callable[[Queue], object]) -> Document:
        def change() -> Document:
            action(self._opened())
            self._listed = -_MAX_AGE_S
            return self._list()

        return self._thread.submit(change).result()

    def _opened(self) -> Queue:
        if self._queue is None:
            self._queue = self._open_queue()
        return self._queue

    def _list(self) -> Document:
        if time.monotonic() - self._listed >= _MAX_AGE_S:
            try:
                jobs = self._opened().jobs(everything=True)
                rows = job_rows(jobs, user_name(os.geteuid()), is_root=os.geteuid() == 0)
                self._document = {"rows": rows[:_MOST_JOBS]}
            except HeadwaterError as error:
                self._document = {"error": str(error)}
            self._listed = time.monotonic()
        return self._document


_MOST_JOBS = 200
