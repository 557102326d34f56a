"""Who has started this process as a rank, and ends with it or is gone already. Nothing here imports torch."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from headwater.fabric.report import ERROR_FILE
from headwater.fabric.secret import SECRET

PARENT = "HEADWATER_PARENT"
"""Environment variable: the launcher that has started this process as a rank, or the rank that started it."""

LISTENER = "HEADWATER_LISTENER"
"""Environment variable: the open file at which rank 0 listens for the others, who may be there before it."""

RENDEZVOUS = "HEADWATER_RENDEZVOUS"
"""Environment variable: where the others reach rank 0 on this host."""

_OF_RANKS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *(PARENT, LISTENER, RENDEZVOUS, SECRET, ERROR_FILE),
)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """From now on this process gets SIGTERM when the one that has started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def find_parent() -> None:
    """Be a rank of the launcher that has started this process, and end with it; or be none.

    A program that a rank has started finds the rank's variables, and is no rank.
    """
    launcher = int(os.environ.get(PARENT, "0"))
    if not launcher:
        return
    if is_alive(launcher) and os.getppid() != launcher:
        for name in _OF_RANKS:
            os.environ.pop(name, None)
        return
    end_with_parent()
    if os.getppid() != launcher:  # it has ended before it could be heard of
        os.kill(os.getpid(), signal.SIGTERM)


def is_alive(process: int) -> bool:
    """Whether a process of this host runs; one that has ended and is not yet waited for does not."""
    return _state(process) not in (None, b"Z", b"X")


def is_stopped(process: int) -> bool:
    """Return whether a process of this host was stopped by a signal or a debugger."""
    return _state(process) in (b"T", b"t")


def _state(process: int) -> bytes | None:
    try:
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return None
