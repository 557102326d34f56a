"""Ends a process when the process that has started it ends. Nothing here imports torch."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from headwater.fabric.report import ERROR_FILE
from headwater.fabric.secret import SECRET
from headwater.fabric.variables import LISTENER, PARENT, RENDEZVOUS

_OF_RANKS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *(PARENT, LISTENER, RENDEZVOUS, SECRET, ERROR_FILE),
)
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Make the system send SIGTERM to this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def end_with(parent: int) -> None:
    """End this process when its parent ends. If the parent has ended already, end this process now.

    Args:
        parent: process number of the parent, which the parent has passed to this process.
    """
    end_with_parent()
    if os.getppid() != parent:  # the parent ended before the line above took effect
        os.kill(os.getpid(), signal.SIGTERM)


def find_parent() -> None:
    """Find out whether a launcher started this process. If so, end this process when the launcher ends.

    A program that a rank has started inherits the rank's environment variables, but is not a rank. In such a
    program the variables are removed.
    """
    launcher = int(os.environ.get(PARENT, "0"))
    if not launcher:
        return
    # The parent of this process is a rank, not the launcher.
    if is_alive(launcher) and os.getppid() != launcher:
        for name in _OF_RANKS:
            os.environ.pop(name, None)
        return
    end_with(launcher)


def is_alive(process: int) -> bool:
    """True if a process of this host runs. A zombie does not."""
    # A zombie still has a process number, so sending signal 0 would succeed.
    return _state(process) not in (None, b"Z", b"X")


def is_stopped(process: int) -> bool:
    """True if a process of this host was stopped by a signal or a debugger."""
    return _state(process) in (b"T", b"t")


def _state(process: int) -> bytes | None:
    try:
        # The state follows the last bracket. The name of a program may itself contain spaces and brackets.
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return None
