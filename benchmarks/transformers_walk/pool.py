"""Calls of a function on many items, each in a separate process with limits of time and memory."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_MEMORY_BYTES = 10 << 30


class ChildError(Exception):
    """The process ended without a result."""


def run_isolated(
    function: Callable[[Item], Result], items: Iterable[Item], *, workers: int, limit_s: float
) -> Iterator[Result | ChildError]:
    """Return the results in the order of the items; a `ChildError` for an item that took too long or crashed.

    Processes are forked, so they do not import anything again.
    """
    context = multiprocessing.get_context("fork")

    def run(item: Item) -> Result | ChildError:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(function, item, sender))
        process.start()
        sender.close()
        try:
            return (
                receiver.recv() if receiver.poll(limit_s) else ChildError(f"took more than {limit_s:.0f} s")
            )
        except EOFError:
            process.join()
            return ChildError(f"the process ended with {process.exitcode}")
        finally:
            process.kill()
            process.join()

    with ThreadPoolExecutor(workers) as threads:
        yield from threads.map(run, items)


def _child(function: Callable[[Item], Result], item: Item, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    sender.send(function(item))
