"""The rank that caused the failure of several ranks, and the report of the failure."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Collection, Iterable
from typing import Any

from headwater.core.errors import RankError
from headwater.core.exit_codes import INTERRUPTED
from headwater.fabric.report import reported_error


@dataclasses.dataclass(frozen=True)
class Failure:
    """The failure of one rank: its exit code or signal, and the error that it has reported.

    Attributes:
        rank: its number.
        place: its process, and its host if there are several.
        exit_code: exit code of its process. If a signal ended the process, minus the number of the signal.
            `None` if it is unknown because the actor that watched the process is lost too.
        report: its error report; see `read_report`.
        time_s: when it ended, by the launcher's clock.
        was_killed: True if the launcher killed it because it did not end when it was asked to.
    """

    rank: int
    place: str
    exit_code: int | None
    report: dict[str, Any]
    time_s: float
    was_killed: bool = False

    @property
    def restart_may_help(self) -> bool:
        """True if a restart may help: the process was killed, or could not reach another rank."""
        if self.report:
            return self.report.get("kind") == RankError.__name__
        return self.exit_code is None or self.exit_code < 0

    def order(self, passed_on: Collection[int]) -> tuple[int, float]:
        """Return a sort key: the failure with the smallest key caused the others.

        Kinds of failures are compared first, since the clocks of several hosts differ.
        """
        time_s = self.report.get("time_s", self.time_s)
        # The launcher killed this rank because another rank had failed.
        if self.was_killed and not self.report:
            return 3, time_s
        if self.report.get("kind") == RankError.__name__:
            return 2, time_s  # this rank could not reach another rank, which probably failed before
        if not self.report and self.exit_code == -signal.SIGTERM:
            # The launcher has sent this SIGTERM: for the user, or because another rank had failed.
            return 1 if signal.SIGTERM in passed_on else 3, time_s
        return 0, time_s


def cause(failures: Iterable[Failure], passed_on: Collection[int] = ()) -> Failure:
    """Return the failure that probably caused the others: the one with the smallest `order`."""
    return min(failures, key=lambda each: each.order(passed_on))


def exit_code(failures: Iterable[Failure], passed_on: Collection[int] = ()) -> int:
    """Return the exit code of ranks that failed. Print why the first failed if that has not been printed.

    Args:
        failures: all ranks that failed.
        passed_on: signals that the launcher has passed on to the ranks.

    Raises:
        HeadwaterError: the error of the rank that caused the failure.
    """
    failures = list(failures)
    first = cause(failures, passed_on)
    for each in failures:
        if each.was_killed:
            print(f"rank {each.rank} ({each.place}) did not end and was killed", file=sys.stderr)
    if "traceback" in first.report:
        print(f"rank {first.rank} has failed:\n{first.report['traceback']}", end="", file=sys.stderr)
        return 1
    if first.report:
        raise reported_error(first.report)
    if first.exit_code is None:
        ended = "is gone"
    elif first.exit_code < 0:
        if -first.exit_code in passed_on:
            return 128 - first.exit_code
        ended = f"was ended by {_signal_name(-first.exit_code)}"
    else:
        # Rank 0 has already printed the reason.
        if first.exit_code == INTERRUPTED or first.rank == 0:
            return first.exit_code
        ended = f"ended with exit code {first.exit_code}"
    raise RankError(
        f"rank {first.rank} ({first.place}) {ended}",
        remedy="find out why; the same command continues from the last complete checkpoint, if there is one",
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
