"""Interface of a rank to the other ranks: shared memory within a host, barriers and gathers."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from headwater.core.buffers import aligned_empty
from headwater.core.placement import ONE_RANK, Placement

if TYPE_CHECKING:
    from headwater.fabric.link import Link

Value = TypeVar("Value")

DEFAULT_TIMEOUT_S = 600.0
"""Default number of seconds that a rank waits for another rank."""


PIECE_BYTES = 4 << 20
"""Bytes in which large data is sent piece by piece, so that one piece is processed while the next is sent."""


class Fabric(abc.ABC):
    """Interface of a rank to all ranks of its run. Every rank makes the same calls in the same order.

    The argument `what` of a call names what the rank waits for. If ranks of a host wait for different things
    at a barrier or a gather, all of them raise `StreamError`.

    Attributes:
        rank: number of this rank, from 0.
        placement: number of compute ranks and store ranks.
        local_rank: number of this rank on its host; rank 0 of a host is its leader.
        local_size: number of ranks on this host.
        hosts: index of the host of each rank, from 0. Ranks of one host are consecutive.
    """

    rank: int
    placement: Placement
    local_rank: int
    local_size: int
    hosts: Sequence[int]

    @cached_property
    def host(self) -> int:
        """Index of the host of this rank."""
        return self.hosts[self.rank]

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return self.placement.size

    @cached_property
    def num_csx(self) -> int:
        """Number of compute ranks."""
        return self.placement.num_csx

    @cached_property
    def computes(self) -> bool:
        """True for a compute rank. A store rank keeps masters and optimizer state, and updates them."""
        return self.rank < self.num_csx

    @cached_property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.hosts[-1] + 1

    @property
    def neighbours(self) -> Fabric:
        """A `Fabric` of only the ranks of this host."""
        return self

    @abc.abstractmethod
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate page-aligned memory that the ranks of a host share. All of them must make the same calls.

        Args:
            num_bytes: size of the memory.

        Returns:
            Zeros (uint8), `num_bytes` or more. The n-th call returns the same memory on all ranks of a host.
        """

    @abc.abstractmethod
    def connect(self, purpose: str) -> Link | None:
        """Return a new connection of the leaders of all hosts; `None` on other ranks, and with one host."""

    @abc.abstractmethod
    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Block until `condition()` is true.

        Args:
            condition: returns true after another rank of the host has done something.
            what: name of the awaited event, for messages.

        Raises:
            RankError: if a rank of the host has ended, or the timeout has passed.
        """

    @abc.abstractmethod
    def exclusive(self) -> AbstractContextManager[object]:
        """Return a lock that one thread of one rank of this host holds at a time. Hold it briefly.

        Each holder sees what the previous one wrote. The lock is reentrant.
        """

    @abc.abstractmethod
    def barrier(self, what: str) -> None:
        """Block until every rank has called this; see `wait_until`."""

    @abc.abstractmethod
    def gather(self, value: float, what: str = "a number of each rank") -> list[float]:
        """Gather a number from each rank, and return all of them on every rank."""

    @abc.abstractmethod
    def gather_objects(self, value: Value, kind: Any, what: str = "a value of each rank") -> list[Value]:
        """Gather a value of any type that `headwater.fabric.codec` knows; slower than `gather`."""

    @abc.abstractmethod
    def gather_tensors(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Gather tensors of equal shape and dtype from the compute ranks. Only these ranks call it."""

    @abc.abstractmethod
    def agree(self, make: Callable[[], Value], kind: Any, what: str = "a value of rank 0") -> Value:
        """Broadcast from rank 0: return what `make` returns there, or raise what `make` raises there.

        Args:
            make: called only on rank 0.
            kind: the type of its value; see `headwater.fabric.codec`.
            what: name of the value, for messages.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Close connections and shared files."""


class Alone(Fabric):
    """The `Fabric` of a run with one rank. Every method returns at once."""

    rank = local_rank = 0
    local_size = 1
    placement = ONE_RANK
    hosts = (0,)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return aligned_empty(num_bytes)

    def connect(self, purpose: str) -> Link | None:
        return None

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        assert condition(), f"{what} is awaited, but there is no other rank"

    def exclusive(self) -> AbstractContextManager[object]:
        return nullcontext()

    def barrier(self, what: str) -> None:
        pass

    def gather(self, value: float, what: str = "") -> list[float]:
        return [value]

    def gather_objects(self, value: Value, kind: Any, what: str = "") -> list[Value]:
        return [value]

    def gather_tensors(self, value: torch.Tensor) -> list[torch.Tensor]:
        return [value]

    def agree(self, make: Callable[[], Value], kind: Any, what: str = "") -> Value:
        return make()

    def close(self) -> None:
        pass


ALONE = Alone()


class Board:
    """Counters that the ranks of a host share. Two ranks never write the same counter at the same time.

    Args:
        fabric: the ranks.
        slots: number of counters; each is 0 at first.
    """

    def __init__(self, fabric: Fabric, slots: int) -> None:
        self._fabric = fabric
        # A processor writes the 8 bytes of a counter at once, so a reader never sees half of a number.
        self._values = fabric.allocate(8 * max(slots, 1))[: 8 * slots].view(torch.int64).numpy()

    def post(self, slot: int, value: int) -> None:
        """Set a counter."""
        self._values[slot] = value

    def read(self, slot: int) -> int:
        """Return a counter."""
        return int(self._values[slot])

    def wait(self, slot: int, value: int, what: str) -> None:
        """Block until a counter is at least `value`; see `Fabric.wait_until`.

        Args:
            slot: number of the counter.
            value: the least value to wait for.
            what: name of the awaited event, for messages.
        """
        values = self._values
        # Usually the counter is high enough already. Then this read is all that the wait costs.
        if values[slot] < value:
            self._fabric.wait_until(lambda: bool(values[slot] >= value), what)
