"""The ranks of a run by number, and the host and process of each."""

from __future__ import annotations

import dataclasses
import functools

from headwater.core.placement import Placement
from headwater.fabric.rendezvous import Process


@dataclasses.dataclass(frozen=True)
class Roster:
    """The rank of this process, and the process of every rank of the run.

    Attributes:
        rank: number of this rank.
        placement: number of compute ranks and store ranks.
        processes: by rank. Ranks of one host are consecutive.
    """

    rank: int
    placement: Placement
    processes: tuple[Process, ...]

    @functools.cached_property
    def host_names(self) -> list[str]:
        """Name of each host."""
        # The hosts have the order of their ranks, so host 0 has rank 0.
        return list(dict.fromkeys(process.host for process in self.processes))

    @functools.cached_property
    def hosts(self) -> list[int]:
        """Index of the host of each rank."""
        return [self.host_names.index(process.host) for process in self.processes]

    @property
    def host(self) -> int:
        """Index of the host of this rank."""
        return self.hosts[self.rank]

    @property
    def leaders(self) -> list[int]:
        """The first rank of each host."""
        return [self.hosts.index(host) for host in range(len(self.host_names))]

    @property
    def neighbours(self) -> dict[int, Process]:
        """Rank -> process, for all ranks of this host including this rank, in rank order."""
        return {rank: self.processes[rank] for rank, host in enumerate(self.hosts) if host == self.host}

    def name(self, host: int) -> str:
        """Return the name of a host with its ranks, for messages."""
        ranks = [rank for rank, its in enumerate(self.hosts) if its == host]
        name = self.host_names[host]
        return f"{name}, rank {ranks[0]}" if len(ranks) == 1 else f"{name}, ranks {ranks[0]} to {ranks[-1]}"

    def others(self) -> str:
        """Return, for messages, the names of the other hosts, or the other ranks if there is one host."""
        if len(self.host_names) == 1:
            return "the others"
        return " or ".join(self.name(host) for host in range(len(self.host_names)) if host != self.host)
