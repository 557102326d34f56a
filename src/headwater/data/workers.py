"""Map of a function over tasks in worker processes: results in order, few tasks in flight."""

from __future__ import annotations

import collections
import concurrent.futures
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from headwater.core.errors import DataError
from headwater.core.process_value import ProcessValue
from headwater.core.safe_path import safe_path

Task = TypeVar("Task")
Result = TypeVar("Result")

_work = ProcessValue[Callable[[Any], Any] | None](None)
"""The function that this worker process applies to tasks. It is sent to the process once, at its start."""


def ordered_map(work: Callable[[Task], Result], tasks: Iterable[Task], num_workers: int) -> Iterator[Result]:
    """Yield `work(task)` for each task, in order.

    `work` is pickled once per worker. At most two tasks per worker are read ahead. Processes are spawned, not
    forked, so that they inherit neither locks of threads nor open files.

    Args:
        work: function to apply.
        tasks: arguments, read as needed.
        num_workers: worker processes; 1 or less: work in this process.

    Raises:
        DataError: if a worker process dies.
    """
    if num_workers <= 1:
        yield from map(work, tasks)
        return
    with safe_path():  # the pool's semaphores start the resource tracker process
        pool = concurrent.futures.ProcessPoolExecutor(
            num_workers, multiprocessing.get_context("spawn"), initializer=_install, initargs=(work,)
        )
    flying: collections.deque[concurrent.futures.Future[Result]] = collections.deque()
    try:
        for task in tasks:
            with safe_path(), _interrupts_blocked():  # a worker may be started for the task
                flying.append(pool.submit(_run, task))
            if len(flying) > 2 * num_workers:
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died, perhaps because memory ran out",
            remedy="use fewer workers (--num_workers)",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C inside the context. Processes that start there inherit this.

    A worker imports modules before it can ignore the signal, and would print a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _install(work: Callable[[Any], Any]) -> None:
    _work.value = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of several processes would compete
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and stops the workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit when the parent exits.

    A worker holds both ends of its queues. If the parent were killed, the worker would otherwise block
    forever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "only worker processes run this"
    parent.join()
    os._exit(1)


def _run(task: Any) -> Any:
    assert _work.value is not None, "the pool's initializer runs before any task"
    return _work.value(task)
