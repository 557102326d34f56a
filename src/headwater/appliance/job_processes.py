"""Kills the processes of a job whose watcher process is gone."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from headwater.appliance.folder import ENVIRONMENT
from headwater.core.placement import JOB

_TIMEOUT_S = 10.0
_PAUSE_S = 0.02
_EMPTY_PASSES = 2


def kill_processes(queue: Path, job: str) -> bool:
    """Kill the processes of a job. They are recognized by their environment, which names the job.

    One pass over all processes can miss some: processes that start during the pass, and those that are just
    replacing their program, whose environment cannot be read at that moment. So passes are repeated until two
    in a row find none.

    Args:
        queue: folder of the job's queue.
        job: the job's name.

    Returns:
        True if none is left; false if some are left after 10 seconds.
    """
    end = time.monotonic() + _TIMEOUT_S
    empty = 0
    while True:
        empty = empty + 1 if _kill_once(queue, job) else 0
        if empty == _EMPTY_PASSES:
            return True
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE_S)


def _kill_once(queue: Path, job: str) -> bool:
    """Kill the processes of a job that one pass finds. Return true if it finds none."""
    is_empty = True
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get(JOB) == job and environment.get(ENVIRONMENT) == str(queue):
                is_empty = False
                process.kill()
            elif not environment and _is_replacing_its_program(process.pid):
                is_empty = False
        except psutil.Error:
            continue  # the process is gone, or belongs to another user
    return is_empty


def _is_replacing_its_program(pid: int) -> bool:
    """Return true if a process is in the middle of `execve`: it has memory, but no arguments yet."""
    place = Path("/proc", str(pid))
    try:
        has_memory = not (place / "statm").read_bytes().startswith(b"0 ")
        return has_memory and not (place / "cmdline").read_bytes()
    except OSError:
        return False
