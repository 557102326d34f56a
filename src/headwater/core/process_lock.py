"""A lock of one process, which its forks find free."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final


@final
class ProcessLock:
    """A lock that is free in a fork, also if a thread of the parent holds it.

    That thread does not exist in the fork, so there a plain lock would never be released. What the lock
    protects must have no half-done state in memory: a fork begins it again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock within the context."""
        with self._lock:
            yield
