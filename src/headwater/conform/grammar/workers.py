"""Processes that run the cases of a campaign. A process that ends or hangs costs only one case."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import multiprocessing
import time
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from headwater.conform.grammar.case import PLAIN, Outcome, Part, run_case
from headwater.conform.isolated import PRELOADED
from headwater.core.precision import PrecisionName
from headwater.fabric.parent import end_with_parent

_START_S = 60.0
"""Seconds that a process may take to start, in addition to the time limit of a case."""

_CHUNK = 500
"""Cases after which a process is replaced by a fresh one."""


@dataclasses.dataclass
class _Worker:
    """A process with the cases that it works on.

    Attributes:
        process: the process.
        receiver: receives the parts that it begins, and the outcomes.
        cases: numbers of the cases that it has not finished.
        part: the part that it began last.
        since: time at which this part began, by the monotonic clock, in seconds.
        end: the reason why the process has ended or must be ended; `None` while it works.
    """

    process: BaseProcess
    receiver: Connection
    cases: deque[int]
    part: Part | None = None
    since: float = dataclasses.field(default_factory=time.monotonic)
    end: str | None = None


def run_cases(
    seed: int,
    cases: Iterable[int],
    *,
    workers: int,
    limit_s: float,
    precision: PrecisionName = "fp32",
    shrinks: bool = True,
) -> Iterator[Outcome]:
    """Yield the outcome of each case, in the order in which the cases finish.

    Args:
        seed: seed of the campaign.
        cases: numbers of the cases.
        workers: number of processes at a time.
        limit_s: seconds for each part of a case. After this time the process is killed, and the outcome of
            the case is a crash.
        precision: precision of the forwards.
        shrinks: true to make programs with faults smaller.
    """
    for module in PRELOADED:
        # Before the forks, so that no process imports them for itself.
        importlib.import_module(module)
    waiting = deque(cases)
    running: list[_Worker] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                chunk = deque(waiting.popleft() for _ in range(min(_CHUNK, len(waiting))))
                running.append(_start(seed, chunk, precision, shrinks))
            # Looked at before the time limits: a message that has arrived renews the limit of its process.
            ready = wait([worker.receiver for worker in running], timeout=1.0)
            for worker in list(running):
                if worker.receiver in ready:
                    yield from _receive(worker)
                elif time.monotonic() - worker.since > limit_s + (worker.part is None) * _START_S:
                    worker.end = f"took more than {limit_s:.0f} s"
                if worker.end is not None:
                    running.remove(worker)
                    yield from _ended(worker)
                    waiting.extendleft(reversed(worker.cases))
    finally:
        for worker in running:
            worker.process.kill()
            worker.process.join()


def _start(seed: int, cases: deque[int], precision: PrecisionName, shrinks: bool) -> _Worker:
    """Start a process with these cases."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(seed, list(cases), precision, shrinks, sender), daemon=True)
    process.start()
    # Otherwise this process, and those forked later, would keep the pipe open when the worker has ended.
    sender.close()
    return _Worker(process, receiver, cases)


def _receive(worker: _Worker) -> Iterator[Outcome]:
    """Yield the outcome that the process sent, if it sent one."""
    try:
        message = worker.receiver.recv()
    # Also after the last case: `_ended` finds no case then.
    except (EOFError, OSError):
        worker.process.join()
        worker.end = f"the process ended with {_exit(worker.process)}"
        return
    worker.since = time.monotonic()
    if isinstance(message, Outcome):
        worker.part = None
        worker.cases.popleft()
        yield message
    else:
        worker.part = message


def _ended(worker: _Worker) -> Iterator[Outcome]:
    """End the process, and yield a crash as the outcome of the case that it did not finish, if any."""
    worker.process.kill()
    worker.process.join()
    if worker.cases:
        case = worker.cases.popleft()
        part = worker.part or Part(case, PLAIN, (), "")
        yield part.crashed(str(worker.end))


def _exit(process: BaseProcess) -> str:
    """Return a phrase that says how a process ended: its exit code or signal."""
    code = process.exitcode
    return f"signal {-code}" if code is not None and code < 0 else f"code {code}"


def _work(seed: int, cases: list[int], precision: PrecisionName, shrinks: bool, sender: Connection) -> None:
    """Run the cases; this is the main function of a process."""
    end_with_parent()
    torch.set_num_threads(1)
    for case in cases:
        gc.collect()
        gc.freeze()  # the engine looks through all objects that are not frozen, once for each model
        sender.send(run_case(seed, case, precision=precision, shrinks=shrinks, begin=sender.send))
