"""Calls of a function on many items, each in a separate process with limits of time and memory."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import resource
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TypeVar

import psutil

Item = TypeVar("Item")
Result = TypeVar("Result")

_MEMORY_BYTES = 10 << 30
_WALL_OF_CPU = 20
"""Limit of the wall time of a process, as a multiple of that of its CPU time."""


class ChildError(Exception):
    """The process ended without a result."""


def run_isolated(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int, limit_s: float
) -> Iterator[Result | ChildError]:
    """Return the results in the order of the items; a `ChildError` for an item that took too long or crashed.

    `limit_s` is CPU time, so that results do not depend on other work of the machine. A process that waits is
    ended after twenty times as many seconds.
    Processes are forked, so they do not import anything again. Their temporary files are in a folder that is
    removed, and processes that they have started are ended, even if they took too long. If the caller stops
    iterating, the items that have not been started are left out, and running processes are ended.
    """
    context = multiprocessing.get_context("fork")
    running: set[BaseProcess] = set()
    forking = threading.Lock()

    def run(item: Item, folder: str) -> Result | ChildError:
        # One at a time: a process that another thread forks would also hold the sender, and the end of this
        # process would be noticed only after the end of that one.
        with forking:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(function, item, sender, folder, limit_s))
            process.start()
            running.add(process)
            sender.close()
        try:
            if receiver.poll(_WALL_OF_CPU * limit_s):
                result: Result = receiver.recv()
                return result
            return ChildError(f"took more than {_WALL_OF_CPU * limit_s:.0f} s")
        except EOFError:
            process.join()
            if process.exitcode == -signal.SIGXCPU:
                return ChildError(f"took more than {limit_s:.0f} s of CPU time")
            return ChildError(f"the process ended with {process.exitcode}")
        finally:
            running.discard(process)
            _end(process)

    with (
        tempfile.TemporaryDirectory(prefix="headwater-bench-") as folder,
        ThreadPoolExecutor(workers) as threads,
    ):
        results = [threads.submit(run, item, folder) for item in items]
        try:
            for result in results:
                yield result.result()
        finally:
            for result in results:
                result.cancel()
            for process in tuple(running):
                _end(process)


def _end(process: BaseProcess) -> None:
    """Kill a process and the processes that it has started."""
    started: list[psutil.Process] = []
    pid = process.pid
    assert pid is not None, "the process was started"
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(pid).children(recursive=True)
    process.kill()
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    process.join()


def _child(
    function: Callable[[Item], Result], item: Item, sender: Connection, folder: str, limit_s: float
) -> None:
    # Beyond the addresses that the fork has got: its stack could not grow if these were more than the limit.
    most = psutil.Process().memory_info().vms + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit_s), math.ceil(limit_s) + 5))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()  # so that the processes that it starts can be ended after it has crashed
    tempfile.tempdir = folder
    sender.send(function(item))
