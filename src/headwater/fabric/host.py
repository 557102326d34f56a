"""Ranks that are processes of one host: they share memory and look at each other's progress there."""

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
    """Ranks of one host, each of them a process.

    What is shared lies in files without names; the system frees each when no process uses it any more.

    Args:
        switchboard: of this rank.
        processes: by rank; those of a host follow each other.
        timeout_s: how long another rank may keep this one waiting.
        num_memx: how many of them, the last ones, are store ranks.
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
        # A store rank waits for all that the others do beside: evaluations, long steps.
        self._timeout_s = timeout_s if self.computes else _STORE_TIMEOUT_S
        self._lock, self._depth = threading.RLock(), 0
        self._file = processes[rank].file
        if self.local_rank != 0:
            os.close(self._file)
            self._file = self._file_of_leader(self._neighbours[0].file)
        sizes = [2, self.local_size, self.local_size, self.size, 1]
        os.ftruncate(self._file, round_up(8 * sum(sizes)))  # the leader may not have come to it yet
        numbers = torch.frombuffer(mmap.mmap(self._file, 8 * sum(sizes)), dtype=torch.int64)
        offered, taken, arrived, values, called = numbers.split(sizes)
        self._offered = offered.numpy()  # the leader's file of an allocation, and the allocation's number
        self._taken = taken.numpy()  # the last allocation of each rank
        self._arrived, self._values = arrived.numpy(), values.view(torch.float64).numpy()
        self._called = called.numpy()  # when the leader last began to speak with other hosts, ns; 0: never
        self._allocations = self._barriers = 0
        self._every = self._mesh(range(self.size))
        self._computing = self._mesh(range(self.num_csx)) if self.placement.num_memx else self._every
        # It is more patient: others wait in it while the first rank does something for all.
        self._patient = self._mesh(range(self.size), max(DEFAULT_TIMEOUT_S, self._timeout_s))
        with self._errors():
            self._patient.gather(b"")  # the file is as long as it is to be, and everybody has it open

    def _mesh(self, ranks: Sequence[int], timeout_s: float | None = None) -> Mesh:
        """Connections of some ranks; all make it, also those that are not among them."""
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
            self.wait_until(lambda: bool(self._offered[1] >= number), "memory that is shared")
            file = self._file_of_leader(int(self._offered[0]))
        pages = mmap.mmap(file, size)
        self._taken[self.local_rank] = number
        if self.local_rank == 0:
            self.wait_until(lambda: bool((self._taken >= number).all()), "all to have the memory")
        os.close(file)
        return torch.frombuffer(pages, dtype=torch.uint8)

    def _file_of_leader(self, number: int) -> int:
        """What the first rank of the host calls so."""
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
                        remedy="see what the other ranks are doing; the last complete checkpoint is intact",
                    )

    def _stopped(self) -> str:
        """Return which ranks of the host do not run, for messages."""
        first = self.rank - self.local_rank
        stopped = [
            f"rank {rank} (process {process.pid}) is stopped"
            for rank, process in enumerate(self._neighbours, start=first)
            if is_stopped(process.pid)
        ]
        return ": " + ", ".join(stopped) if stopped else ""

    def _patient_from(self, start: float) -> float:
        """From when on the timeout counts for something that is waited for since `start`.

        A call to other hosts that may be under way ends by itself in time, and says which is missing.
        """
        called = int(self._called[0])
        return max(start, called * 1e-9 + self._timeout_s) if called else start

    def _check_alive(self, what: str) -> None:
        first = self.rank - self.local_rank
        for rank, process in enumerate(self._neighbours, start=first):
            if not is_alive(process.pid):
                raise RankError(
                    f"rank {rank} (process {process.pid}) is gone, and rank {self.rank} waits for {what}",
                    remedy="see why it ended; the run goes on from its last complete checkpoint",
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
        """Whether the file is this rank's now; the system frees it with the process."""
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
        self.barrier("a number of every rank")
        values: list[float] = np.array(self._values[: self.size]).tolist()
        self.barrier("all to have read it")
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
                    remedy="let every rank compute the same",
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
                remedy="see what the other ranks say, and why they ended",
            ) from error

    def _others(self) -> str:
        """Who they are, for messages."""
        return "the others"

    def close(self) -> None:
        for mesh in (self._every, self._computing, self._patient):
            mesh.close()
        self._switchboard.close()
        with contextlib.suppress(OSError):
            os.close(self._file)
