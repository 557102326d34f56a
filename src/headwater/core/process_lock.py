"""A lock that is free in a forked process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final


@final
class ProcessLock:
    """A lock that is free in a forked process, even if a thread of the parent holds it.

    That thread does not exist in the fork, so a plain lock would never be released there. The work under the
    lock must be such that a fork can begin it again, whatever the parent's thread had done.
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
