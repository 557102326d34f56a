"""The ranks of a run as processes of one host or of several hosts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch

from headwater.core.placement import Placement
from headwater.fabric.fabric import ALONE, Fabric, Value
from headwater.fabric.host import HostGroup
from headwater.fabric.leaders import Leaders
from headwater.fabric.link import Link
from headwater.fabric.messages import Messages
from headwater.fabric.roster import Roster
from headwater.fabric.switchboard import Switchboard

_STORE_TIMEOUT_S = 7 * 24 * 3600.0


@final
class ProcessFabric(Fabric):
    """The `Fabric` of ranks that are processes. Ranks of a host share memory; leaders connect the hosts.

    Args:
        switchboard: the connections of this rank.
        roster: the ranks.
        timeout_s: seconds to wait for another rank before an error is raised.
    """

    def __init__(self, switchboard: Switchboard, roster: Roster, timeout_s: float) -> None:
        self._switchboard = switchboard
        self.rank, self.placement, self.hosts = roster.rank, roster.placement, roster.hosts
        local = list(roster.neighbours)
        self.local_rank, self.local_size = local.index(roster.rank), len(local)
        # A store rank also waits during evaluations and long steps of the compute ranks.
        timeout_s = timeout_s if self.computes else _STORE_TIMEOUT_S
        self._host = HostGroup(roster, timeout_s)
        self._messages = Messages(switchboard, roster, timeout_s, self._host.watch.stopped)
        # Blocks until every rank of the host has opened the file of its leader.
        self._messages.meet()
        self._leaders = None
        if self.num_hosts > 1:
            self._leaders = Leaders(switchboard, roster, self._host, timeout_s)
        # A gather of one host's ranks runs as a gather of all ranks, so all hosts must make the same gathers.
        self._neighbours: Fabric = self
        if self._leaders is not None:
            self._neighbours = ALONE if self.num_hosts == self.size else _HostPart(self, self._host)

    @property
    def neighbours(self) -> Fabric:
        return self._neighbours

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return self._host.memory.allocate(num_bytes)

    def connect(self, purpose: str) -> Link | None:
        return None if self._leaders is None else self._leaders.connect(purpose)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        self._host.watch.wait_until(condition, what)

    def exclusive(self) -> AbstractContextManager[object]:
        return self._host.lock.held()

    def barrier(self, what: str) -> None:
        self._host.barrier(what)
        if self._leaders is not None:
            # The leaders wait for each other. The second barrier then releases the other ranks of each host.
            self._leaders.meet()
            self._host.barrier(what)

    def gather(self, value: float, what: str = "a number of each rank") -> list[float]:
        values = self._host.values
        values[self.rank] = value
        self._host.barrier(what)
        if self._leaders is not None:
            self._leaders.share(values)
            self._host.barrier("the values of all hosts")
        every: list[float] = values.tolist()
        # After this barrier a rank may overwrite its value.
        self._host.barrier("all ranks to read the values")
        return every

    def gather_objects(self, value: Value, kind: Any, what: str = "a value of each rank") -> list[Value]:
        # Messages alone would not show that another rank is in a barrier: each would wait for the other.
        self._host.barrier(what)
        return self._messages.gather(value, kind)

    def gather_tensors(self, value: torch.Tensor) -> list[torch.Tensor]:
        return self._messages.gather_tensors(value)

    def agree(self, make: Callable[[], Value], kind: Any, what: str = "a value of rank 0") -> Value:
        self._host.barrier(what)
        return self._messages.agree(make, kind)

    def close(self) -> None:
        if self._leaders is not None:
            # The links are closed before the switchboard, because they connect through it.
            self._leaders.close()
        self._messages.close()
        self._switchboard.close()
        # The host group comes last, because all objects above use its watch.
        self._host.close()


@final
class _HostPart(Fabric):
    """The `Fabric` of only the ranks of one host, in a run on several hosts.

    Barriers and memory stay on this host. A gather runs through all hosts, and returns the values of this
    host.

    Args:
        every: the ranks of all hosts.
        host: the ranks of this host.
    """

    def __init__(self, every: ProcessFabric, host: HostGroup) -> None:
        self._every = every
        self._host = host
        self.rank = self.local_rank = every.local_rank
        self.local_size = every.local_size
        self.placement = Placement(self.local_size)
        self.hosts = [0] * self.local_size

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return self._host.memory.allocate(num_bytes)

    def connect(self, purpose: str) -> Link | None:
        return None

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        self._host.watch.wait_until(condition, what)

    def exclusive(self) -> AbstractContextManager[object]:
        return self._host.lock.held()

    def barrier(self, what: str) -> None:
        self._host.barrier(what)

    def gather(self, value: float, what: str = "a number of each rank") -> list[float]:
        return self._here(self._every.gather(value, what))

    def gather_objects(self, value: Value, kind: Any, what: str = "a value of each rank") -> list[Value]:
        return self._here(self._every.gather_objects(value, kind, what))

    def gather_tensors(self, value: torch.Tensor) -> list[torch.Tensor]:
        return self._here(self._every.gather_tensors(value))

    def _here(self, values: list[Value]) -> list[Value]:
        first = self._every.rank - self.local_rank
        return values[first : first + self.local_size]

    def agree(self, make: Callable[[], Value], kind: Any, what: str = "a value of rank 0") -> Value:
        return self._every.agree(make, kind, what)

    def close(self) -> None:
        """Do nothing: the ranks of all hosts own the connections."""
