"""What this process does when it is told to stop, for a while."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


def speaks_for_all() -> bool:
    """Whether this process is the one of all ranks that says what all of them hear."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def handled(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Handles these signals so within the context; outside of the main thread there are none to handle."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
