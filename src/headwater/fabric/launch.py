"""Several ranks on this machine: started by running a command so many times, and what became of them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from headwater.core.errors import RankError
from headwater.core.placement import Placement
from headwater.core.signals import handled
from headwater.fabric.membership import check_cores, num_cores
from headwater.fabric.outcome import Failure, exit_code
from headwater.fabric.report import read_report

_NUM_THREADS = "OMP_NUM_THREADS"


def launch(placement: Placement, command: Sequence[str], *, where: str, max_restarts: int = 0) -> int:
    """Run a command of Python as ranks on this machine; returns its exit code.

    Args:
        placement: how many; store ranks need no core of their own.
        command: what follows the interpreter.
        where: the number was written; for errors.
        max_restarts: how often all are started again when one is gone, or misses another; an error that says
            what is wrong would come again.

    Raises:
        ConfigError: if there are not so many cores.
        HeadwaterError: what the first rank that failed has met.
    """
    check_cores(placement.num_csx, where=where)
    with _threads_of_a_rank(num_cores() // placement.num_csx) if placement.size > 1 else nullcontext():
        return _launch(placement, command, max_restarts)


@contextmanager
def _threads_of_a_rank(number: int) -> Iterator[None]:
    """Within it processes that start compute with so many threads, unless the user has said how many."""
    if _NUM_THREADS in os.environ:
        yield
        return
    os.environ[_NUM_THREADS] = str(number)
    try:
        yield
    finally:
        del os.environ[_NUM_THREADS]


def _launch(placement: Placement, command: Sequence[str], max_restarts: int) -> int:
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks speak for themselves
    # On another thread the agent leaves signals alone: it would end the ranks in the middle of a step.
    with ThreadPoolExecutor(1) as pool, _signals_for_ranks() as passed_on:
        for restart in range(1, max_restarts + 1):
            try:
                return _run(pool, placement, command, passed_on)
            except RankError as error:
                if passed_on:
                    raise
                again = f"starting again from the last complete checkpoint ({restart} of {max_restarts})"
                print(f"{error.what}; {again}", file=sys.stderr)
        return _run(pool, placement, command, passed_on)


def _run(pool: Executor, placement: Placement, command: Sequence[str], passed_on: Sequence[int]) -> int:
    """Run the ranks to their end; see `exit_code`."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=placement.size,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
    done = pool.submit(elastic_launch(config, sys.executable), *command)
    told: dict[int, int] = {}
    while not done.done():
        time.sleep(0.05)
        _pass_on(passed_on, told)
    failure = done.exception()
    if isinstance(failure, ChildFailedError):
        return exit_code(map(_failure, failure.failures.values()), passed_on)
    done.result()
    return 0


@contextmanager
def _signals_for_ranks() -> Iterator[list[int]]:
    """Gives the signals that the ranks are to get.

    A terminal's Ctrl-C does not reach them, as each is of a session of its own: so it hears everything once.
    """
    heard: list[int] = []
    with handled(dict.fromkeys((signal.SIGINT, signal.SIGTERM), lambda number, frame: heard.append(number))):
        yield heard


def _pass_on(numbers: Sequence[int], told: dict[int, int]) -> None:
    """Send every rank what it has not got yet: a signal may come before there are ranks."""
    for process in psutil.Process().children() if numbers else ():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(process.pid) != process.pid:
                continue  # a copy of this process, for a moment, which would take it for the launcher's
            for number in numbers[told.get(process.pid, 0) :]:
                process.send_signal(number)
            told[process.pid] = len(numbers)


def _failure(told: ProcessFailure) -> Failure:
    """What the agent says of a rank. Its time is in whole seconds."""
    return Failure(
        rank=told.local_rank,
        place=f"process {told.pid}",
        exit_code=told.exitcode,
        told=read_report(told.error_file),
        time_s=told.timestamp,
    )
