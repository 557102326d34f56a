"""Ranks on several hosts: ranks of one host share memory; one of them, the leader, talks to other hosts."""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed

from headwater.core.errors import ConfigError, RankError
from headwater.core.placement import Placement
from headwater.fabric.fabric import ALONE, DEFAULT_TIMEOUT_S, Fabric, Value
from headwater.fabric.host import HostFabric
from headwater.fabric.link import Link
from headwater.fabric.meeting import Process, meet
from headwater.fabric.switchboard import Switchboard
from headwater.fabric.torch_group import start_group


def join_ranks(timeout_s: float = DEFAULT_TIMEOUT_S, num_memx: int = 0) -> Fabric:
    """Rendezvous with the ranks that a launcher has started, and return them.

    Args:
        timeout_s: seconds to wait for another rank before an error is raised.
        num_memx: number of store ranks. They are the last ranks.

    Returns:
        The ranks of the run; this process is one of them.

    Raises:
        ConfigError: if all ranks would be store ranks.
        RankError: if ranks cannot be reached, or the ranks of a host are not numbered consecutively.
    """
    patience_s = max(timeout_s, DEFAULT_TIMEOUT_S)  # another rank may still be measuring the machine
    own = Process(host_name(), os.getpid(), os.memfd_create("headwater"))
    switchboard, processes = meet(own, patience_s)
    size = len(processes)
    if not torch.distributed.is_initialized():
        start_group(switchboard, size, patience_s)
    if num_memx >= size:
        raise ConfigError(
            f"num_memx={num_memx}, but {size} ranks were started, so no rank is left to compute",
            where="num_memx",
            remedy=f"start at least {num_memx + 1} ranks: num_csx + num_memx is their number",
        )
    names = [process.host for process in processes]
    if len(set(names)) == 1:
        return HostFabric(switchboard, processes, timeout_s, num_memx)
    if any(a != b and b in names[:i] for i, (a, b) in enumerate(itertools.pairwise(names), 1)):
        raise RankError(
            f"expected consecutive rank numbers on each host, got hosts by rank: {', '.join(names)}",
            remedy="start the ranks host by host, as torchrun does; with srun: --distribution=block",
        )
    return ClusterFabric(switchboard, processes, timeout_s, num_memx)


def host_name() -> str:
    """Return the machine's name, with the launcher's node: one machine may run several nodes as hosts."""
    node = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID"))
    return os.uname().nodename if node is None else f"{os.uname().nodename} (node {node})"


class ClusterFabric(HostFabric):
    """Ranks on several hosts.

    Args:
        switchboard: the connections of this rank.
        processes: by rank. Ranks of one host are consecutive.
        timeout_s: seconds to wait for another rank before an error is raised.
        num_memx: number of store ranks. They are the last ranks.
    """

    def __init__(
        self, switchboard: Switchboard, processes: Sequence[Process], timeout_s: float, num_memx: int = 0
    ) -> None:
        super().__init__(switchboard, processes, timeout_s, num_memx)
        names = list(dict.fromkeys(process.host for process in processes))
        self._leaders = [self.hosts.index(host) for host in range(self.num_hosts)]
        self._names = [_with_ranks(name, self.hosts, host) for host, name in enumerate(names)]
        self._links: weakref.WeakSet[Link] = weakref.WeakSet()
        self._control = self.connect("control messages")
        # A gather of one host runs as a gather of the whole cluster: all hosts must make it, or none.
        self._of_host = ALONE if self.num_hosts == self.size else _OfHost(self)

    @property
    def neighbours(self) -> Fabric:
        return self._of_host

    def connect(self, purpose: str) -> Link | None:
        mesh = self._mesh(self._leaders)
        if self.local_rank != 0:
            return None
        link = Link(purpose, mesh, self._names, self.host, self._note_call)
        self._links.add(link)
        return link

    def _note_call(self) -> None:
        self._called[0] = time.monotonic_ns()

    def _others(self) -> str:
        return " or ".join(name for host, name in enumerate(self._names) if host != self.host)

    def barrier(self, what: str) -> None:
        super().barrier(what)  # first the ranks of this host, then all leaders, which release their hosts
        if self._control is not None:
            self._control.gather(torch.zeros(1))
        super().barrier(what)

    def gather(self, value: float) -> list[float]:
        self._values[self.rank] = value
        super().barrier("the values of all ranks")
        if self._control is not None:
            every = self._control.gather(torch.from_numpy(self._values[: self.size].copy()))
            for rank, host in enumerate(self.hosts):
                self._values[rank] = every[host, rank]
        super().barrier("the values of all hosts")
        values: list[float] = self._values[: self.size].tolist()
        super().barrier("all ranks to read the values")
        return values

    def close(self) -> None:
        for link in list(self._links):
            link.close()
        super().close()


def _with_ranks(name: str, hosts: Sequence[int], host: int) -> str:
    """Return the name of a host with its ranks, for messages."""
    ranks = [rank for rank, its in enumerate(hosts) if its == host]
    return f"{name}, rank {ranks[0]}" if len(ranks) == 1 else f"{name}, ranks {ranks[0]} to {ranks[-1]}"


class _OfHost(Fabric):
    """The ranks of one host of a cluster.

    Barriers and memory stay on this host. A gather runs through the whole cluster, and returns the values of
    this host.

    Args:
        cluster: the ranks of all hosts.
    """

    def __init__(self, cluster: ClusterFabric) -> None:
        self._cluster = cluster
        self.rank = self.local_rank = cluster.local_rank
        self.local_size = cluster.local_size
        self.placement = Placement(self.local_size)
        self.hosts = [0] * self.local_size

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return self._cluster.allocate(num_bytes)

    def connect(self, purpose: str) -> Link | None:
        return None

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        self._cluster.wait_until(condition, what)

    def exclusive(self) -> AbstractContextManager[object]:
        return self._cluster.exclusive()

    def barrier(self, what: str) -> None:
        HostFabric.barrier(self._cluster, what)

    def gather(self, value: float) -> list[float]:
        return self._here(self._cluster.gather(value))

    def gather_objects(self, value: Value, kind: Any) -> list[Value]:
        return self._here(self._cluster.gather_objects(value, kind))

    def gather_tensors(self, value: torch.Tensor) -> list[torch.Tensor]:
        return self._here(self._cluster.gather_tensors(value))

    def _here(self, values: list[Value]) -> list[Value]:
        first = self._cluster.rank - self.local_rank
        return values[first : first + self.local_size]

    def agree(self, make: Callable[[], Value], kind: Any) -> Value:
        return self._cluster.agree(make, kind)

    def close(self) -> None:
        """Do nothing: the cluster owns the connections."""
