"""The ranks of one host as a group, which wait for each other by counters in shared memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import final

from headwater.core.errors import StreamError
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
        self._first = next(iter(neighbours))
        self._local_rank = roster.rank - self._first
        self.watch = HostWatch(roster.rank, neighbours, timeout_s, lambda: int(numbers.called[0]) * 1e-9)
        self.memory = HostMemory(roster, numbers, self.watch)
        self.lock = HostLock(numbers.file, self.watch)
        self.values = numbers.values
        self._num_barriers = 0

    def note_call(self) -> None:
        """Record the time at which the leader of the host begins a call to other hosts."""
        self._numbers.called[0] = time.monotonic_ns()

    def barrier(self, what: str) -> None:
        """Block until every rank of the host has called this; see `Fabric.wait_until`.

        Raises:
            StreamError: if the ranks wait for different things.
        """
        # All ranks make the same calls, so this count is the number of the barrier on every rank. The counts
        # only grow. So a rank that is already at its next barrier still counts as arrived at this one.
        self._num_barriers += 1
        count, arrived = self._num_barriers, self._numbers.arrived
        # A rank may be at its next barrier, but not at the one after that, while another reads these texts.
        awaited = self._numbers.awaited[count % 2]
        awaited[self._local_rank] = what.encode()
        arrived[self._local_rank] = count
        self.watch.wait_until(lambda: bool((arrived >= count).all()), what)
        if (awaited != awaited[self._local_rank]).any():
            raise self._different(awaited.tolist())

    def _different(self, awaited: Sequence[bytes]) -> StreamError:
        """Return the error of ranks that wait for different things, which they would wait for forever."""
        mine = awaited[self._local_rank]
        other = next(local for local, text in enumerate(awaited) if text != mine)
        waits = [
            f"rank {self._first + local} waits for {awaited[local].decode(errors='replace')}"
            for local in sorted((self._local_rank, other))
        ]
        return StreamError(
            f"all ranks must run the same operations, but {', and '.join(waits)}",
            remedy="run the operation on all ranks: not inside of `if task_id() == 0`, for example. "
            "A step_closure or checkpoint_closure runs on rank 0 alone",
        )

    def close(self) -> None:
        """Close the shared file."""
        with contextlib.suppress(OSError):
            # The mapping stays until the last tensor over it is gone.
            os.close(self._numbers.file)
