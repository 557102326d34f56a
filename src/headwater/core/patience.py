"""Notices about work that takes longer than a user expects."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headwater.core.signals import speaks_for_all
from headwater.core.units import format_duration

SILENCE_S, INTERVAL_S = 3.0, 10.0
"""Seconds before the first notice, and from one notice to the next."""


class Activity:
    """Holds the name of the work that is running now, for notices."""

    def __init__(self, name: str) -> None:
        self.name = name


def print_notice(text: str) -> None:
    """Print a line on stderr, on the first rank only."""
    if speaks_for_all():
        print(text, file=sys.stderr, flush=True)


@contextmanager
def notice_if_long(
    name: str,
    *,
    silence_s: float = SILENCE_S,
    interval_s: float = INTERVAL_S,
    say: Callable[[str], None] = print_notice,
) -> Iterator[Activity]:
    """Print what is running if the context takes longer than `silence_s`, then every `interval_s`.

    Args:
        name: the work, as in "measuring the speed of this machine".
        silence_s: seconds before the first notice.
        interval_s: seconds from one notice to the next.
        say: prints a notice.
    """
    activity, over, start_s = Activity(name), threading.Event(), time.monotonic()

    def watch() -> None:
        wait_s = silence_s
        while not over.wait(wait_s):
            say(f"{activity.name} ({format_duration(time.monotonic() - start_s)} so far)")
            wait_s = interval_s

    # A forked process has no such thread and nothing to print; the name tells whose thread it is.
    watcher = threading.Thread(target=watch, name=f"headwater-notice-{os.getpid()}", daemon=True)
    watcher.start()
    try:
        yield activity
    finally:
        over.set()
        # A notice after the end of the context would be wrong.
        watcher.join()
