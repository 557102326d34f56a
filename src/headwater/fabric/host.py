"""The ranks of one host as a group, which wait for each other by counters in shared memory."""

from __future__ import annotations

import contextlib
import os
import time
from typing import final

from headwater.fabric.host_memory import HostLock, HostMemory, HostNumbers
from headwater.fabric.host_watch import HostWatch
from headwater.fabric.roster import Roster


@final
class HostGroup:
    """The ranks of one host, each of them a process.

    Args:
        roster: the ranks of the run.
        timeout_s: seconds to wait for another rank of the host before an error is raised.

    Attributes:
        watch: waits for ranks of the host.
        memory: allocates memory that they share.
        lock: a lock of these ranks.
        values: float64, a number of each rank of the run, shared by the ranks of the host.
    """

    def __init__(self, roster: Roster, timeout_s: float) -> None:
        self._numbers = numbers = HostNumbers(roster)
        neighbours = roster.neighbours
        self._local_rank = list(neighbours).index(roster.rank)
        self.watch = HostWatch(roster.rank, neighbours, timeout_s, lambda: int(numbers.called[0]) * 1e-9)
        self.memory = HostMemory(roster, numbers, self.watch)
        self.lock = HostLock(numbers.file, self.watch)
        self.values = numbers.values
        self._num_barriers = 0

    def note_call(self) -> None:
        """Record the time at which the leader of the host begins a call to other hosts."""
        self._numbers.called[0] = time.monotonic_ns()

    def barrier(self, what: str) -> None:
        """Block until every rank of the host has called this; see `Fabric.wait_until`."""
        # All ranks make the same calls, so this count is the number of the barrier on every rank. The counts
        # only grow. So a rank that is already at its next barrier still counts as arrived at this one.
        self._num_barriers += 1
        count, arrived = self._num_barriers, self._numbers.arrived
        arrived[self._local_rank] = count
        self.watch.wait_until(lambda: bool((arrived >= count).all()), what)

    def close(self) -> None:
        """Close the shared file."""
        with contextlib.suppress(OSError):
            # The mapping stays until the last tensor over it is gone.
            os.close(self._numbers.file)
