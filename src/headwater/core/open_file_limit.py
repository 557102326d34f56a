"""The number of files that a process may have open."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

_SPARE = 128
"""Files that the program, its libraries and its checkpoints may open besides."""


def allow_open_files(count: int) -> None:
    """Raise the soft limit of this process, up to the hard limit, so that it can open further files.

    Many systems have a soft limit of 1,024 files, and a much higher hard limit for programs that need more.

    Args:
        count: the number of further files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    needed = sum(1 for _ in Path("/proc/self/fd").iterdir()) + count + _SPARE
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if allowed > soft:
        with contextlib.suppress(OSError, ValueError):  # then a file that cannot be opened is the error
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
