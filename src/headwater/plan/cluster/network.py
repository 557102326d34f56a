"""Transfers between hosts, and how long they occupy the links.

All hosts do the same at the same time, so one of them is simulated. The exchange is that of the engine
(`headwater.fabric.link`): each host sends directly to every other host, all at once.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from math import ceil

from headwater.plan.cluster.timeline import Kind, Timeline
from headwater.plan.cluster.types import Machines, Network

PIECE_BYTES = 8 << 20
"""Maximum bytes that a switch receives before it forwards them."""
MOST_PIECES = 16
"""Maximum number of pieces into which a stage's transfer is divided in the simulation."""


class Links(abc.ABC):
    """Links that carry weights to the compute hosts, and gradients back.

    Attributes:
        out: the resource with which a compute host sends.
        into: the resource with which it receives.
    """

    out: int
    into: int

    def __init__(self, timeline: Timeline, network: Network) -> None:
        self._timeline = timeline
        self._network = network
        self.out = timeline.resource("host", "network out")
        self.into = timeline.resource("host", "network in")

    def broadcast(self, stage: int, num_bytes: int, after: Sequence[int]) -> int:
        """Add the tasks that send the weights of a stage to all hosts; return the one that ends last."""
        return self._send(Kind.BROADCAST, "weights", stage, num_bytes, after)

    def reduce(self, stage: int, num_bytes: int, after: Sequence[int]) -> int:
        """Add the tasks that send the gradients of a stage to their owners; return the one that ends last."""
        return self._send(Kind.REDUCE, "gradients", stage, num_bytes, after)

    @abc.abstractmethod
    def _send(self, kind: Kind, name: str, stage: int, num_bytes: int, after: Sequence[int]) -> int:
        """Add the tasks of a broadcast or a reduction; return the one that ends last."""

    @property
    @abc.abstractmethod
    def agreement_s(self) -> float:
        """Seconds until all hosts know a number of every host, such as the norm of the gradients."""

    def _seconds(self, num_bytes: float) -> float:
        return num_bytes / self._network.bytes_per_s

    def _delay(self, kind: Kind, stage: int, hops: int, after: Sequence[int]) -> int:
        return self._timeline.add(kind, "latency", stage, hops * self._network.latency_s, after=after)


class Peers(Links):
    """Links of compute hosts that each own a share: they receive its gradients and send its new weights."""

    def __init__(self, timeline: Timeline, network: Network, hosts: int) -> None:
        super().__init__(timeline, network)
        self._hosts = hosts

    def _send(self, kind: Kind, name: str, stage: int, num_bytes: int, after: Sequence[int]) -> int:
        moved = (self._hosts - 1) / self._hosts * num_bytes  # a host keeps its own share
        links = (self.out, self.into)
        sent = self._timeline.add(kind, name, stage, self._seconds(moved), links, after, moved)
        return self._delay(kind, stage, 1, [sent])

    @property
    def agreement_s(self) -> float:
        # This is an upper bound: the engine sends to all other hosts at once.
        return (self._hosts - 1) * self._network.latency_s


class Dedicated(Links):
    """Links between compute hosts and the hosts of a weight store, through switches that only forward."""

    def __init__(self, timeline: Timeline, network: Network, machines: Machines) -> None:
        super().__init__(timeline, network)
        self._each = machines.hosts / machines.owners
        self._num_hosts = machines.hosts + machines.owners
        self.store_out = timeline.resource("store", "network out")
        self.store_into = timeline.resource("store", "network in")

    def _send(self, kind: Kind, name: str, stage: int, num_bytes: int, after: Sequence[int]) -> int:
        """Add the transfer of a stage's weights or gradients to the timeline.

        The link of a compute host carries the whole stage. A host of the store owns a share of the stage, and
        its link carries this share once for each compute host.
        """
        to_hosts = kind is Kind.BROADCAST
        links = (self.into, self.store_out) if to_hosts else (self.out, self.store_into)
        both = [
            self._timeline.add(kind, name, stage, self._seconds(moved), (link,), after, moved)
            for link, moved in zip(links, (float(num_bytes), self._each * num_bytes), strict=True)
        ]
        return self._delay(kind, stage, 1, both)

    @property
    def agreement_s(self) -> float:
        return (self._num_hosts - 1) * self._network.latency_s


class Switches(Links):
    """A tree of switches that copy weights on the way down and sum gradients on the way up."""

    def __init__(self, timeline: Timeline, network: Network, machines: Machines) -> None:
        super().__init__(timeline, network)
        assert network.fan_out is not None, "such switches have a fan-out"
        levels, reach = 1, network.fan_out
        while reach < machines.hosts:
            levels, reach = levels + 1, reach * network.fan_out
        self._owners = machines.owners
        names = [f"level {level}" for level in range(1, levels)]
        down = [timeline.resource("switches", f"{name} down") for name in names]
        up = [timeline.resource("switches", f"{name} up") for name in names]
        self.store_out = timeline.resource("store", "network out")
        self.store_into = timeline.resource("store", "network in")
        self._down = [self.store_out, *down, self.into]
        self._up = [self.out, *reversed(up), self.store_into]

    def _send(self, kind: Kind, name: str, stage: int, num_bytes: int, after: Sequence[int]) -> int:
        """Add a transfer, piece by piece from link to link. An owner's link carries only its own share."""
        path = self._down if kind is Kind.BROADCAST else self._up
        pieces = max(1, min(ceil(num_bytes / PIECE_BYTES), MOST_PIECES))
        piece, last = num_bytes / pieces, -1
        for _ in range(pieces):
            before = after
            for link in path:
                size = piece / self._owners if link in (self.store_out, self.store_into) else piece
                last = self._timeline.add(kind, name, stage, self._seconds(size), (link,), before, size)
                before = [last]
        return self._delay(kind, stage, len(path), [last])

    @property
    def agreement_s(self) -> float:
        return 2 * len(self._down) * self._network.latency_s  # up to the store, and down again


def connect(timeline: Timeline, machines: Machines) -> Links | None:
    """Return the links of a run; `None` if nothing is sent between hosts."""
    network = machines.cluster.network
    if machines.cluster.store is None:
        if machines.hosts == 1:
            return None
        assert network is not None, "several hosts have a network"
        return Peers(timeline, network, machines.hosts)
    assert network is not None, "a cluster with a separate weight store has a network"
    if network.fan_out is None:
        return Dedicated(timeline, network, machines)
    return Switches(timeline, network, machines)
