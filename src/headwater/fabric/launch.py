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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from headwater.core.errors import RankError
from headwater.core.exit_codes import INTERRUPTED
from headwater.core.placement import Placement
from headwater.core.signals import handled
from headwater.fabric.membership import check_cores, num_cores
from headwater.fabric.report import read_report, told_error


def launch(placement: Placement, command: Sequence[str], *, where: str) -> int:
    """Run a command of Python as several ranks on this machine; returns its exit code.

    Args:
        placement: how many; store ranks need no core of their own.
        command: what follows the interpreter.
        where: the number was written; for errors.

    Raises:
        ConfigError: if there are not so many cores.
        HeadwaterError: what the first rank that failed has met.
    """
    check_cores(placement.num_csx, where=where)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks speak for themselves
    os.environ.setdefault("OMP_NUM_THREADS", str(num_cores() // placement.num_csx))
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
    # On another thread the agent leaves signals alone: it would end the ranks in the middle of a step.
    with ThreadPoolExecutor(1) as pool, _signals_for_ranks() as passed_on:
        done = pool.submit(elastic_launch(config, sys.executable), *command)
        told: set[tuple[int, int]] = set()
        while not done.done():
            time.sleep(0.05)
            _pass_on(passed_on, told)
    failure = done.exception()
    if isinstance(failure, ChildFailedError):
        first = min(failure.failures.values(), key=_order)
        return 128 - first.exitcode if -first.exitcode in passed_on else _exit_code(first)
    done.result()
    return 0


@contextmanager
def _signals_for_ranks() -> Iterator[list[int]]:
    """Ctrl-C reaches the ranks by itself, as they belong to the same job; SIGTERM is passed on.

    Gives the signals that were.
    """
    passed_on: list[int] = []
    with handled({
        signal.SIGINT: lambda number, frame: None,
        signal.SIGTERM: lambda number, frame: passed_on.append(number),
    }):  # fmt: skip
        yield passed_on


def _pass_on(numbers: Sequence[int], told: set[tuple[int, int]]) -> None:
    """Send every rank what it has not got yet: a signal may come before there are ranks."""
    for number in numbers:
        for process in psutil.Process().children():
            if (process.pid, number) not in told:
                told.add((process.pid, number))
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)


def _order(failure: ProcessFailure) -> tuple[bool, float]:
    """The first that failed is the least. What the agent has ended, it has ended because of another.

    The agent's own time is in whole seconds.
    """
    told = read_report(failure.error_file)
    return not told and failure.exitcode == -signal.SIGTERM, told.get("time_s", failure.timestamp)


def _exit_code(first: ProcessFailure) -> int:
    """The exit code of ranks of which one has failed first; says why if it has not said so itself.

    Raises:
        HeadwaterError: what that one has met.
    """
    told = read_report(first.error_file)
    if "traceback" in told:
        print(f"rank {first.local_rank} has failed:\n{told['traceback']}", end="", file=sys.stderr)
        return first.exitcode
    if told:
        raise told_error(told)
    if first.exitcode == INTERRUPTED or (first.exitcode > 0 and first.local_rank == 0):
        return first.exitcode
    ended = f"ended with exit code {first.exitcode}"
    if first.exitcode < 0:
        ended = f"was ended by {signal.Signals(-first.exitcode).name}"
    raise RankError(
        f"rank {first.local_rank} (process {first.pid}) {ended}",
        remedy="see why; the same command goes on from the last complete checkpoint, if it has written one",
    )
