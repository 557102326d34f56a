"""Memory that the ranks of one host share, and a lock that one of these ranks holds at a time.

Shared memory consists of unnamed files. The system frees a file when no process uses it any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from typing import final

import torch

from headwater.core.buffers import PAGE_BYTES, round_up
from headwater.fabric.host_watch import HostWatch
from headwater.fabric.roster import Roster

_TEXT_WORDS = 12
"""64-bit words of a text. A longer text is cut off."""


@final
class HostNumbers:
    """Counters and process ids of a host's ranks, in shared memory. One rank at a time writes a number.

    Args:
        roster: the ranks.

    Attributes:
        file: descriptor of the file in this process.
        offered: descriptor of the leader's last allocation in its process, and the number of that allocation.
        taken: number of the last allocation that each rank of the host has mapped.
        arrived: number of the last barrier that each rank of the host has reached.
        awaited: UTF-8 texts, what each rank of the host waits for in its barriers, for barriers with even and
            odd numbers.
        values: float64, one of each rank of the run.
        called: time (ns, monotonic) of the leader's last call to other hosts; 0: never.
    """

    def __init__(self, roster: Roster) -> None:
        neighbours = roster.neighbours
        leader, own = next(iter(neighbours.values())), neighbours[roster.rank]
        self.file = own.file
        if own is not leader:
            # The ranks of a host share the leader's file, so this rank does not need the file it has made.
            os.close(self.file)
            self.file = open_file_of(leader.pid, leader.file)
        words = 2 * len(neighbours) * _TEXT_WORDS
        sizes = [2, len(neighbours), len(neighbours), len(roster.processes), 1, words]
        os.ftruncate(self.file, round_up(8 * sum(sizes)))  # the leader may not have done this yet
        numbers = torch.frombuffer(mmap.mmap(self.file, 8 * sum(sizes)), dtype=torch.int64)
        offered, taken, arrived, values, called, awaited = numbers.split(sizes)
        self.offered, self.taken, self.arrived = offered.numpy(), taken.numpy(), arrived.numpy()
        self.values, self.called = values.view(torch.float64).numpy(), called.numpy()
        self.awaited = awaited.numpy().view(f"S{8 * _TEXT_WORDS}").reshape(2, len(neighbours))


def open_file_of(process: int, number: int) -> int:
    """Open the file that another process of this user has under descriptor `number`. Return a descriptor."""
    return os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)


@final
class HostMemory:
    """Allocates memory that all ranks of one host share. All of them make the same calls.

    Args:
        roster: the ranks.
        numbers: shared by the ranks of the host.
        watch: waits for these ranks.
    """

    def __init__(self, roster: Roster, numbers: HostNumbers, watch: HostWatch) -> None:
        first, leader = next(iter(roster.neighbours.items()))
        self._leader, self._local_rank = leader.pid, roster.rank - first
        self._numbers = numbers
        self._watch = watch
        self._count = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate at least `num_bytes` bytes of zeros (uint8); see `Fabric.allocate`."""
        size = max(round_up(num_bytes), PAGE_BYTES)
        self._count = number = self._count + 1
        offered, taken = self._numbers.offered, self._numbers.taken
        if self._local_rank == 0:
            file = os.memfd_create("headwater")
            os.ftruncate(file, size)
            offered[:] = file, number
        else:
            self._watch.wait_until(lambda: bool(offered[1] >= number), "shared memory")
            file = open_file_of(self._leader, int(offered[0]))
        try:
            pages = mmap.mmap(file, size)
            taken[self._local_rank] = number
            if self._local_rank == 0:
                # The other ranks open the file by its descriptor in this process, so it must stay open.
                self._watch.wait_until(
                    lambda: bool((taken >= number).all()), "all ranks to map shared memory"
                )
        finally:
            os.close(file)
        return torch.frombuffer(pages, dtype=torch.uint8)


@final
class HostLock:
    """A reentrant lock that one thread of one rank of a host holds at a time.

    The system unlocks the file when its process ends.

    Args:
        file: descriptor of a file that each rank of the host has opened itself.
        watch: waits for these ranks.
    """

    def __init__(self, file: int, watch: HostWatch) -> None:
        self._file = file
        self._watch = watch
        self._threads, self._depth = threading.RLock(), 0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock inside the context."""
        # The lock of the file does not separate threads of one process. So a lock of threads comes first.
        with self._threads:
            if not self._depth:
                self._watch.wait_until(self._try_lock, "its turn")
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def _try_lock(self) -> bool:
        try:
            # This call does not block: a blocked rank would not notice that another rank has died.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
