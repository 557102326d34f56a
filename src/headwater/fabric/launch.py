"""Several ranks on this machine: started by running a command so many times, and what became of them.

Nothing here imports torch: a launcher lives as long as its ranks, and would take 170 MiB beside them.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NoReturn

from headwater.core.errors import RankError
from headwater.core.placement import Placement
from headwater.core.signals import Handler, handled
from headwater.fabric.cores import bound_to, check_cores, cores_of_ranks, num_cores
from headwater.fabric.outcome import Failure, cause, exit_code
from headwater.fabric.parent import LISTENER, PARENT, RENDEZVOUS
from headwater.fabric.report import ERROR_FILE, read_report
from headwater.fabric.secret import SECRET, new_secret

_PROGRAM = "headwater.cli.ranks"
_NUM_THREADS = "OMP_NUM_THREADS"
_WATCH_S = 0.05
_GRACE_S = 30.0


def become_launcher(
    placement: Placement,
    command: Sequence[str],
    *,
    where: str,
    max_restarts: int = 0,
    of_script: bool = False,
) -> NoReturn:
    """Let this process be the launcher of its own command from now on, without what it has imported.

    Args:
        placement: see `launch`.
        command: see `launch`.
        where: see `launch`.
        max_restarts: see `launch`.
        of_script: whether it is that of a script; see [Note: ranks of a script].
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    kind = "script" if of_script else "command"
    words = (kind, placement.num_csx, placement.num_memx, max_restarts, where)
    os.execv(sys.executable, [sys.executable, "-P", "-m", _PROGRAM, *map(str, words), *command])


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
    with _signals_for_ranks() as heard:
        restart = 0
        while failures := _run(placement, command, heard):
            restart += 1
            if heard or restart > max_restarts or not cause(failures).may_pass:
                return exit_code(failures, heard)
            try:
                exit_code(failures)
            except RankError as error:
                again = f"starting again from the last complete checkpoint ({restart} of {max_restarts})"
                print(f"{error.what}; {again}", file=sys.stderr)
        return 0


@contextmanager
def _signals_for_ranks() -> Iterator[list[int]]:
    """Gives the signals that the ranks are to get.

    A terminal's Ctrl-C does not reach them, as each is of a session of its own: so it hears everything once.
    They are asked to end where the terminal is gone, unless (`nohup`) that is not to be heard of.
    """
    heard: list[int] = []
    handlers: dict[int, Handler] = {
        number: lambda number, frame: heard.append(number) for number in (signal.SIGINT, signal.SIGTERM)
    }
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        handlers[signal.SIGHUP] = lambda number, frame: heard.append(signal.SIGTERM)
    with handled(handlers):
        yield heard


@dataclasses.dataclass
class _Rank:
    """A rank that was started.

    Attributes:
        number: which one.
        process: its process.
        report: where it tells what has ended it; see `read_report`.
        num_told: how many of the signals it has got.
        was_killed: it did not end when it was asked to.
    """

    number: int
    process: subprocess.Popen[bytes]
    report: str
    num_told: int = 0
    was_killed: bool = False


def _run(placement: Placement, command: Sequence[str], heard: Sequence[int]) -> list[Failure]:
    """Run the ranks to their end; those that have not ended well.

    Raises:
        RankError: if the system does not let them start.
    """
    ranks: list[_Rank] = []
    with ExitStack() as at_end:
        try:
            at_end.callback(_end, ranks)
            for rank in _start(placement, command, at_end):
                ranks.append(rank)
        except OSError as error:
            raise RankError(
                f"rank {len(ranks)} cannot be started: {error.strerror}",
                remedy="see whether there is room for its process, and for a file in memory",
            ) from error
        return _watch(ranks, heard)


def _end(ranks: Iterable[_Rank]) -> None:
    """Let nothing of them be left."""
    for rank in ranks:
        rank.process.kill()
        rank.process.wait()


def _start(placement: Placement, command: Sequence[str], at_end: ExitStack) -> Iterator[_Rank]:
    """Start all, one after the other.

    Args:
        placement: how many.
        command: what they run.
        at_end: closes the files of their reports. These have no names: nothing of them stays, whatever ends.
    """
    threads, cores = num_cores() // placement.num_csx, cores_of_ranks(placement.num_csx) or []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # a name that the system chooses; only this host reaches it
        listener.listen(max(128, placement.size))
        secret = new_secret()
        for number in range(placement.size):
            file = os.memfd_create("headwater-report")
            at_end.callback(os.close, file)
            report = f"/proc/{os.getpid()}/fd/{file}"
            own = {
                "RANK": number,
                "LOCAL_RANK": number,
                "WORLD_SIZE": placement.size,
                "LOCAL_WORLD_SIZE": placement.size,
                "GROUP_RANK": 0,
                PARENT: os.getpid(),
                RENDEZVOUS: listener.getsockname().hex(),
                SECRET: secret,
                ERROR_FILE: report,
            }
            if placement.size > 1 and _NUM_THREADS not in os.environ:
                own[_NUM_THREADS] = threads
            if number == 0:
                own[LISTENER] = listener.fileno()
            with bound_to(cores[number] if number < len(cores) else None):
                process = subprocess.Popen(
                    [sys.executable, *command],
                    env={**os.environ, **{name: str(value) for name, value in own.items()}},
                    pass_fds=[listener.fileno()] if number == 0 else (),
                    start_new_session=True,
                )
            yield _Rank(number, process, report)


def _watch(ranks: Iterable[_Rank], heard: Sequence[int]) -> list[Failure]:
    """Wait until all have ended; those that have not ended well.

    When one has failed the others cannot go on: they are asked to end, and have a while for it.

    Args:
        ranks: all.
        heard: signals for all of them; grows meanwhile.
    """
    pending, failures, end = list(ranks), list[Failure](), float("inf")
    while pending:
        for rank in pending:
            for number in heard[rank.num_told :]:
                rank.process.send_signal(number)
                rank.num_told += 1
        ended = [rank for rank in pending if rank.process.poll() is not None]
        pending = [rank for rank in pending if rank not in ended]
        failed = [failure for rank in ended if (failure := _failure(rank)) is not None]
        if failed and not failures:
            end = time.monotonic() + _GRACE_S
            for rank in pending:
                rank.process.terminate()
        failures += failed
        if time.monotonic() > end:
            for rank in pending:
                rank.was_killed = True
                rank.process.kill()
        if pending:
            time.sleep(_WATCH_S)
    return failures


def _failure(rank: _Rank) -> Failure | None:
    """How a rank that has ended has failed, if it has."""
    code = rank.process.returncode
    if not code:
        return None
    place = f"process {rank.process.pid}"
    return Failure(rank.number, place, code, read_report(rank.report), time.time(), rank.was_killed)
