"""The launcher: it starts several ranks on this machine as processes, and reports how they end.

Nothing here imports torch: the launcher runs as long as its ranks, and torch would take 170 MiB more.
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
from types import FrameType
from typing import NoReturn

from headwater.core.errors import RankError
from headwater.core.placement import Placement
from headwater.core.signals import Handler, handled
from headwater.fabric.launch.cores import bound_to, check_cores, cores_of_ranks, num_cores
from headwater.fabric.launch.outcome import Failure, cause, exit_code
from headwater.fabric.report import ERROR_FILE, read_report
from headwater.fabric.secret import SECRET, new_secret
from headwater.fabric.variables import LISTENER, PARENT, RENDEZVOUS

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
    """Replace this process by a launcher that runs its command as ranks.

    `exec` frees the memory of everything that this process has imported.

    Args:
        placement: see `launch`.
        command: see `launch`.
        where: see `launch`.
        max_restarts: see `launch`.
        of_script: True if the command runs a script; see [Note: ranks of a script].
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        # `exec` drops what Python has not written yet.
        stream.flush()
    kind = "script" if of_script else "command"
    words = (kind, placement.num_csx, placement.num_memx, max_restarts, where)
    os.execv(sys.executable, [sys.executable, "-P", "-m", _PROGRAM, *map(str, words), *command])


def launch(placement: Placement, command: Sequence[str], *, where: str, max_restarts: int = 0) -> int:
    """Run a Python command as ranks on this machine.

    Args:
        placement: number of compute ranks and store ranks. Store ranks share their cores.
        command: arguments of the interpreter.
        where: the place where the number of ranks is written, for errors.
        max_restarts: how many times all ranks are started again after a rank was lost or could not reach
            another rank. After other errors they are not, because such an error would occur again.

    Returns:
        The exit code of the command.

    Raises:
        ConfigError: if this process may use too few cores.
        HeadwaterError: the error of the rank that failed first.
    """
    # Checked before any process is started.
    check_cores(placement.num_csx, where=where)
    with _signals_for_ranks() as received:
        restart = 0
        while failures := _run(placement, command, received):
            restart += 1
            if received or restart > max_restarts or not cause(failures).restart_may_help:
                return exit_code(failures, received)
            try:
                exit_code(failures)
            except RankError as error:
                again = f"restarting from the last complete checkpoint ({restart} of {max_restarts})"
                print(f"{error.what}; {again}", file=sys.stderr)
        return 0


@contextmanager
def _signals_for_ranks() -> Iterator[list[int]]:
    """Collect, while the context is open, the signals that the launcher must pass on to its ranks, in a list.

    Each rank has its own session, so Ctrl-C in a terminal reaches only the launcher, which passes it on once.
    When the terminal closes, the ranks get SIGTERM, unless SIGHUP is ignored (`nohup`). Both the kernel and
    the shell send SIGHUP then, but the ranks get only one SIGTERM: a second one would end them at once.
    """
    received: list[int] = []
    handlers: dict[int, Handler] = {
        number: lambda number, frame: received.append(number) for number in (signal.SIGINT, signal.SIGTERM)
    }

    def hang_up(number: int, frame: FrameType | None) -> None:
        if not received:
            received.append(signal.SIGTERM)

    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        handlers[signal.SIGHUP] = hang_up
    with handled(handlers):
        yield received


@dataclasses.dataclass
class _Rank:
    """A rank that this launcher has started: its process, and what the launcher has sent it.

    Attributes:
        number: the number of the rank.
        process: its process.
        report: path of the file to which the rank writes its error; see `read_report`.
        num_sent: number of the collected signals that the launcher has sent to it.
        was_killed: True if it was killed because it did not end when it was asked to.
    """

    number: int
    process: subprocess.Popen[bytes]
    report: str
    num_sent: int = 0
    was_killed: bool = False


def _run(placement: Placement, command: Sequence[str], received: Sequence[int]) -> list[Failure]:
    """Run the ranks until all have ended; return those that failed.

    Raises:
        RankError: if the system cannot start a rank.
    """
    ranks: list[_Rank] = []
    with ExitStack() as at_end:
        try:
            # This comes before the first start: if a later rank cannot be started, earlier ones are killed.
            at_end.callback(_end, ranks)
            for rank in _start(placement, command, at_end):
                ranks.append(rank)
        except OSError as error:
            raise RankError(
                f"rank {len(ranks)} cannot be started: {error.strerror}",
                remedy="check how many processes this user may run, and how much memory is free",
            ) from error
        return _watch(ranks, received)


def _end(ranks: Iterable[_Rank]) -> None:
    """Kill all remaining ranks and reap them."""
    for rank in ranks:
        rank.process.kill()
        rank.process.wait()


def _start(placement: Placement, command: Sequence[str], at_end: ExitStack) -> Iterator[_Rank]:
    """Start the ranks as processes of this machine, in order. Yield each after its start.

    Args:
        placement: number of ranks.
        command: arguments of the interpreter.
        at_end: closes the report files. The files have no names, so closing them removes them.
    """
    threads, cores = num_cores() // placement.num_csx, cores_of_ranks(placement.num_csx) or []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # the system chooses a name that only this host reaches
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
                    # Only rank 0 listens, so the socket closes when rank 0 ends.
                    pass_fds=[listener.fileno()] if number == 0 else (),
                    # Ctrl-C in a terminal would otherwise reach the ranks twice.
                    start_new_session=True,
                )
            yield _Rank(number, process, report)


def _watch(ranks: Iterable[_Rank], received: Sequence[int]) -> list[Failure]:
    """Wait until all ranks have ended; return those that failed.

    When a rank has failed the others cannot continue. They get SIGTERM, and SIGKILL after a grace period.

    Args:
        ranks: all ranks.
        received: signals to pass on to all ranks; the list grows while this runs.
    """
    pending, failures, end = list(ranks), list[Failure](), float("inf")
    while pending:
        for rank in pending:
            # A signal may have arrived before this rank was started.
            for number in received[rank.num_sent :]:
                rank.process.send_signal(number)
                rank.num_sent += 1
        ended = [rank for rank in pending if rank.process.poll() is not None]
        # A second poll would miss the failure of a rank that ends between the two polls.
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
    """Return a `Failure` that says how a rank has ended; `None` if it succeeded."""
    code = rank.process.returncode
    if not code:
        return None
    place = f"process {rank.process.pid}"
    return Failure(rank.number, place, code, read_report(rank.report), time.time(), rank.was_killed)
