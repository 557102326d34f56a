"""Signal handlers that are installed while a context is active."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None]
"""A function that handles a signal."""


def speaks_for_all() -> bool:
    """True if this process prints for all ranks: it is rank 0, or the only rank."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def handled(handlers: Mapping[int, Handler | signal.Handlers]) -> Iterator[None]:
    """Install these handlers, or `SIG_IGN`, inside the context. Does nothing outside of the main thread."""
    # Python refuses handlers in other threads.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
