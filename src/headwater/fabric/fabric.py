"""What a rank sees of the others: memory that those of its host share, and how all wait for each other."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from headwater.core.buffers import aligned_empty
from headwater.core.placement import ONE_RANK, Placement
from headwater.fabric.link import Link

Value = TypeVar("Value")

DEFAULT_TIMEOUT_S = 600.0
"""How long a rank may keep another waiting if nothing else is said."""


class Fabric(abc.ABC):
    """The ranks of a run. Every rank makes the same calls in the same order.

    Attributes:
        rank: which one this is, from 0.
        placement: how many there are, and which of them compute.
        local_rank: which one of its host; 0 leads the host.
        local_size: how many its host has.
        hosts: the host of each rank, from 0; those of a host follow each other.
    """

    rank: int
    placement: Placement
    local_rank: int
    local_size: int
    hosts: Sequence[int]

    @property
    def host(self) -> int:
        """The host of this rank."""
        return self.hosts[self.rank]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.placement.size

    @property
    def num_csx(self) -> int:
        """How many of them compute."""
        return self.placement.num_csx

    @property
    def computes(self) -> bool:
        """Whether this rank computes; otherwise it keeps masters and optimizer state, and updates them."""
        return self.rank < self.num_csx

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return self.hosts[-1] + 1

    @property
    def neighbours(self) -> Fabric:
        """The ranks of this host, as if there were no other host."""
        return self

    @abc.abstractmethod
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory that the ranks of a host see: page-aligned uint8, zero; the n-th call gives all the same."""

    @abc.abstractmethod
    def connect(self, purpose: str) -> Link | None:
        """A connection of the leaders of all hosts, of its own; `None` on other ranks, and for one host."""

    @abc.abstractmethod
    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Return when `condition` holds.

        Args:
            condition: something that another rank of the host brings about.
            what: is waited for; for messages.

        Raises:
            RankError: if a rank is gone, or it takes too long.
        """

    @abc.abstractmethod
    def exclusive(self) -> AbstractContextManager[object]:
        """While it is open no other rank of the host is in one, nor another thread; for moments only.

        What was written within one is seen within the next. It may be nested.
        """

    @abc.abstractmethod
    def barrier(self, what: str) -> None:
        """Return when every rank has come here; see `wait_until`."""

    @abc.abstractmethod
    def gather(self, value: float) -> list[float]:
        """The value of each rank."""

    @abc.abstractmethod
    def gather_objects(self, value: Value, kind: Any) -> list[Value]:
        """The same of any value of a type that `headwater.fabric.codec` knows; slower."""

    @abc.abstractmethod
    def gather_tensors(self, value: torch.Tensor) -> list[torch.Tensor]:
        """The same of tensors of one shape and dtype, of the ranks that compute; only these ask."""

    @abc.abstractmethod
    def agree(self, make: Callable[[], Value], kind: Any) -> Value:
        """Return on every rank what `make` returns on rank 0, or raise what `make` raises there.

        Args:
            make: called on rank 0 alone.
            kind: the type of its value.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what is shared."""


class Alone(Fabric):
    """One rank."""

    rank = local_rank = 0
    local_size = 1
    placement = ONE_RANK
    hosts = (0,)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return aligned_empty(num_bytes)

    def connect(self, purpose: str) -> Link | None:
        return None

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        assert condition(), f"{what} is waited for, and nobody else is there"

    def exclusive(self) -> AbstractContextManager[object]:
        return nullcontext()

    def barrier(self, what: str) -> None:
        pass

    def gather(self, value: float) -> list[float]:
        return [value]

    def gather_objects(self, value: Value, kind: Any) -> list[Value]:
        return [value]

    def gather_tensors(self, value: torch.Tensor) -> list[torch.Tensor]:
        return [value]

    def agree(self, make: Callable[[], Value], kind: Any) -> Value:
        return make()

    def close(self) -> None:
        pass


ALONE = Alone()


class Board:
    """Numbers that the ranks of a host write for each other. One rank at a time writes a number.

    Args:
        fabric: the ranks.
        slots: how many numbers; at first 0.
    """

    def __init__(self, fabric: Fabric, slots: int) -> None:
        self._fabric = fabric
        self._values = fabric.allocate(8 * max(slots, 1))[: 8 * slots].view(torch.int64).numpy()
        if fabric.size == 1:
            self._values[:] = 0

    def post(self, slot: int, value: int) -> None:
        """Write a number."""
        self._values[slot] = value

    def read(self, slot: int) -> int:
        """Read a number."""
        return int(self._values[slot])

    def wait(self, slot: int, value: int, what: str) -> None:
        """Return when a number is at least `value`; see `Fabric.wait_until`."""
        values = self._values
        if values[slot] < value:
            self._fabric.wait_until(lambda: bool(values[slot] >= value), what)
