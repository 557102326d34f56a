"""Ranks that are processes of one host: they share memory and watch each other's progress in it."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from headwater.core.buffers import PAGE_BYTES, round_up
from headwater.core.errors import HeadwaterError, RankError
from headwater.core.placement import Placement
from headwater.fabric.codec import decode, encode
from headwater.fabric.fabric import DEFAULT_TIMEOUT_S, Fabric, Value
from headwater.fabric.link import Link
from headwater.fabric.meeting import Process
from headwater.fabric.mesh import Mesh
from headwater.fabric.parent import is_alive, is_stopped
from headwater.fabric.switchboard import Switchboard

_LONGEST_PAUSE_S = 1e-3
_LIVENESS_S = 0.5
_STORE_TIMEOUT_S = 7 * 24 * 3600.0


class HostFabric(Fabric):
    """The ranks of one host, each of them a process.

    Shared memory consists of unnamed files. The system frees a file when no process uses it any more.

    Args:
        switchboard: the connections of this rank.
        processes: by rank. Ranks of one host are consecutive.
        timeout_s: seconds to wait for another rank before an error is raised.
        num_memx: number of store ranks. They are the last ranks.
    """

    def __init__(
        self, switchboard: Switchboard, processes: Sequence[Process], timeout_s: float, num_memx: int = 0
    ) -> None:
        self._switchboard, rank = switchboard, switchboard.rank
        names = list(dict.fromkeys(process.host for process in processes))
        self.rank, self.placement = rank, Placement(len(processes) - num_memx, num_memx)
        self.hosts = [names.index(process.host) for process in processes]
        first = self.hosts.index(self.host)
        self._neighbours = [p for p in processes if p.host == processes[rank].host]
        self.local_rank, self.local_size = rank - first, len(self._neighbours)
        # A store rank also waits during evaluations and long steps of the compute ranks.
        self._timeout_s = timeout_s if self.computes else _STORE_TIMEOUT_S
        self._lock, self._depth = threading.RLock(), 0
        self._file = processes[rank].file
        if self.local_rank != 0:
            os.close(self._file)
            self._file = self._file_of_leader(self._neighbours[0].file)
        sizes = [2, self.local_size, self.local_size, self.size, 1]
        os.ftruncate(self._file, round_up(8 * sum(sizes)))  # the leader may not have done this yet
        numbers = torch.frombuffer(mmap.mmap(self._file, 8 * sum(sizes)), dtype=torch.int64)
        offered, taken, arrived, values, called = numbers.split(sizes)
        self._offered = offered.numpy()  # file descriptor of the leader's last allocation, and its number
        self._taken = taken.numpy()  # number of the last allocation that each rank has mapped
        self._arrived, self._values = arrived.numpy(), values.view(torch.float64).numpy()
        self._called = called.numpy()  # time (ns) of the leader's last call to other hosts; 0: never
        self._allocations = self._barriers = 0
        self._every = self._mesh(range(self.size))
        self._computing = self._mesh(range(self.num_csx)) if self.placement.num_memx else self._every
        # A longer timeout, for `agree`: the other ranks wait in it while rank 0 works for all.
        self._patient = self._mesh(range(self.size), max(DEFAULT_TIMEOUT_S, self._timeout_s))
        with self._errors():
            self._patient.gather(b"")  # now the file has its full size, and every rank has opened it

    def _mesh(self, ranks: Sequence[int], timeout_s: float | None = None) -> Mesh:
        """Return a mesh of some ranks. All ranks call this, since the number of calls names the mesh."""
        purpose = self._switchboard.next_purpose()
        return Mesh(self._switchboard, ranks, timeout_s or self._timeout_s, purpose)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        size = max(round_up(num_bytes), PAGE_BYTES)
        self._allocations = number = self._allocations + 1
        if self.local_rank == 0:
            file = os.memfd_create("headwater")
            os.ftruncate(file, size)
            self._offered[:] = file, number
        else:
            self.wait_until(lambda: bool(self._offered[1] >= number), "shared memory")
            file = self._file_of_leader(int(self._offered[0]))
        pages = mmap.mmap(file, size)
        self._taken[self.local_rank] = number
        if self.local_rank == 0:
            self.wait_until(lambda: bool((self._taken >= number).all()), "all ranks to map shared memory")
        os.close(file)
        return torch.frombuffer(pages, dtype=torch.uint8)

    def _file_of_leader(self, number: int) -> int:
        """Open the file that has this descriptor in the leader's process."""
        return os.open(f"/proc/{self._neighbours[0].pid}/fd/{number}", os.O_RDWR)

    def connect(self, purpose: str) -> Link | None:
        return None

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        start = time.monotonic()
        pause, looked = 10e-6, start
        while not condition():
            time.sleep(pause)
            pause = min(pause * 1.3, _LONGEST_PAUSE_S)
            now = time.monotonic()
            if now - looked > _LIVENESS_S:
                looked = now
                self._check_alive(what)
                if now - self._patient_from(start) > self._timeout_s:
                    raise RankError(
                        f"rank {self.rank} has waited {now - start:.0f} s for {what}{self._stopped()}",
                        remedy="find out what the other ranks do; the last complete checkpoint is intact",
                    )

    def _stopped(self) -> str:
        """Return which ranks of the host are stopped, for messages."""
        first = self.rank - self.local_rank
        stopped = [
            f"rank {rank} (process {process.pid}) is stopped"
            for rank, process in enumerate(self._neighbours, start=first)
            if is_stopped(process.pid)
        ]
        return ": " + ", ".join(stopped) if stopped else ""

    def _patient_from(self, start: float) -> float:
        """Return the time from which the timeout counts for a wait that began at `start`.

        A call to other hosts may be running. It fails by itself after the timeout, and its error names the
        host that is missing, so this rank waits longer.
        """
        called = int(self._called[0])
        return max(start, called * 1e-9 + self._timeout_s) if called else start

    def _check_alive(self, what: str) -> None:
        first = self.rank - self.local_rank
        for rank, process in enumerate(self._neighbours, start=first):
            if not is_alive(process.pid):
                raise RankError(
                    f"rank {rank} (process {process.pid}) is gone while rank {self.rank} waits for {what}",
                    remedy="find out why it ended; the run continues from its last complete checkpoint",
                )

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._lock:
            if not self._depth:
                self.wait_until(self._lock_file, "its turn")
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    fcntl.flock(self._file, fcntl.LOCK_UN)

    def _lock_file(self) -> bool:
        """True if this rank could lock the file. The system unlocks it when the process ends."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def barrier(self, what: str) -> None:
        self._barriers += 1
        self._arrived[self.local_rank] = self._barriers
        count = self._barriers
        self.wait_until(lambda: bool((self._arrived[: self.local_size] >= count).all()), what)

    def gather(self, value: float) -> list[float]:
        self._values[self.rank] = value
        self.barrier("the values of all ranks")
        values: list[float] = np.array(self._values[: self.size]).tolist()
        self.barrier("all ranks to read the values")  # before a rank overwrites its value
        return values

    def gather_objects(self, value: Value, kind: Any) -> list[Value]:
        return self._gather(value, kind, self._every)

    def _gather(self, value: Value, kind: Any, mesh: Mesh) -> list[Value]:
        with self._errors():
            messages = mesh.gather(encode(value, kind))
        return [decode(message, kind) for message in messages]

    def gather_tensors(self, value: torch.Tensor) -> list[torch.Tensor]:
        values = self._gather(value, torch.Tensor, self._computing)
        for rank, each in enumerate(values):
            if each.shape != value.shape or each.dtype != value.dtype:
                raise RankError(
                    f"expected a tensor of shape {list(value.shape)} and {value.dtype} from rank {rank}, "
                    f"got {list(each.shape)} and {each.dtype}",
                    remedy="compute tensors of the same shape and dtype on every rank",
                )
        return [each.to(value.device) for each in values]

    def agree(self, make: Callable[[], Value], kind: Any) -> Value:
        outcome_kind = tuple[list[kind], HeadwaterError | None]
        message = None
        if self.rank == 0:
            try:
                message = encode(([make()], None), outcome_kind)
            except HeadwaterError as error:
                message = encode(([], error), outcome_kind)
        with self._errors():
            told = self._patient.broadcast(message, 0)
        values, failure = decode(told, outcome_kind)
        if failure is not None:
            raise failure
        return values[0]  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RankError(
                f"rank {self.rank} cannot reach {self._others()}: {error}{self._stopped()}",
                remedy="see the errors of the other ranks, and why they ended",
            ) from error

    def _others(self) -> str:
        """Return the names of the other hosts, for messages."""
        return "the others"

    def close(self) -> None:
        for mesh in (self._every, self._computing, self._patient):
            mesh.close()
        self._switchboard.close()
        with contextlib.suppress(OSError):
            os.close(self._file)
