"""Waiting for other ranks of the same host. Raises an error if one of their processes is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import final

from headwater.core.errors import RankError
from headwater.core.recorder import COLLECTIVE, RECORDER
from headwater.fabric.parent import is_alive, is_stopped
from headwater.fabric.rendezvous import Process

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10e-6, 1e-3
_LIVENESS_S = 0.5


@final
class HostWatch:
    """Waits for conditions that other ranks of this host make true, as long as their processes run.

    Args:
        rank: number of this rank.
        neighbours: processes of this host by rank.
        timeout_s: seconds to wait before an error is raised.
        last_call: returns the time (s, monotonic) of the last call to other hosts; 0: never.
    """

    def __init__(
        self,
        rank: int,
        neighbours: Mapping[int, Process],
        timeout_s: float,
        last_call: Callable[[], float],
    ) -> None:
        self._rank = rank
        self._neighbours = neighbours
        self._timeout_s = timeout_s
        self._last_call = last_call

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Block until `condition()` is true; see `Fabric.wait_until`."""
        if not condition():
            with RECORDER.span(COLLECTIVE):
                self._wait(condition, what)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        start = time.monotonic()
        pause, looked = _FIRST_PAUSE_S, start
        while not condition():
            time.sleep(pause)
            # The first pauses are short, because most waits of a step end within microseconds.
            pause = min(pause * 1.3, _LONGEST_PAUSE_S)
            now = time.monotonic()
            if now - looked > _LIVENESS_S:
                looked = now
                # A dead rank is reported at once, not after the timeout.
                self._check_alive(what)
                if now - self._counted_from(start) > self._timeout_s:
                    raise RankError(
                        f"rank {self._rank} has waited {now - start:.0f} s for {what}{self.stopped()}",
                        remedy="find out what the other ranks do; checkpoints that were complete stay intact",
                    )

    def stopped(self) -> str:
        """Return a phrase for errors that names the ranks of this host whose processes are stopped."""
        stopped = [
            f"rank {rank} (process {process.pid}) is stopped"
            for rank, process in self._neighbours.items()
            if is_stopped(process.pid)
        ]
        return ": " + ", ".join(stopped) if stopped else ""

    def _counted_from(self, start: float) -> float:
        """Return when the timeout begins to count, for a wait that began at `start`.

        A call to other hosts may be running. It fails by itself after the timeout, and its error names the
        host that is missing, so this rank waits longer.
        """
        called = self._last_call()
        return max(start, called + self._timeout_s) if called else start

    def _check_alive(self, what: str) -> None:
        for rank, process in self._neighbours.items():
            if not is_alive(process.pid):
                raise RankError(
                    f"rank {rank} (process {process.pid}) is gone while rank {self._rank} waits for {what}",
                    remedy="find out why it ended; the run continues from its last complete checkpoint",
                )
