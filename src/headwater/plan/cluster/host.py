"""The resources of one compute host, and the transfers over them."""

from __future__ import annotations

from typing import final

from headwater.plan.cluster.disk import DiskQueue
from headwater.plan.cluster.network import Links, connect
from headwater.plan.cluster.timeline import Kind, Timeline
from headwater.plan.cluster.types import Machines


@final
class HostResources:
    """The ranks, links, memory, disk and network of one compute host.

    Attributes:
        timeline: the timeline of the step.
        machines: the hosts and ranks of the run.
        ranks: resource of each rank.
        cores: the resource of each rank if the ranks compute on cores, otherwise empty.
        links_in: link to the accelerator of each rank; empty without accelerators on links.
        links_out: link from the accelerator of each rank.
        memory: the host's memory.
        disk: the host's disk.
        network: the links between hosts; `None` if nothing is sent.

    Args:
        timeline: the timeline of the step.
        machines: the hosts and ranks of the run.
    """

    def __init__(self, timeline: Timeline, machines: Machines) -> None:
        self.timeline = timeline
        self.machines = machines
        host, numbers = machines.cluster.host, range(machines.ranks)
        self.ranks = [timeline.resource("host", f"rank {rank}") for rank in numbers]
        self.links_in: list[int] = []
        self.links_out: list[int] = []
        if host.accelerator is not None and host.accelerator.link_bytes_per_s is not None:
            self.links_in = [timeline.resource("host", f"link {rank} in") for rank in numbers]
            self.links_out = [timeline.resource("host", f"link {rank} out") for rank in numbers]
        self.cores = self.ranks if host.accelerator is None else []
        self.memory = timeline.resource("host", "memory")
        self.disk = DiskQueue(timeline, "host", host.disk)
        self.network: Links | None = connect(timeline, machines)
        self._memory_bytes_per_s = host.memory.bytes_per_s

    def way_in(self, rank: int) -> int:
        """Return the link over which bytes reach the accelerator of a rank."""
        return self.links_in[rank] if self.links_in else self._on_network.into

    def way_out(self, rank: int) -> int:
        """Return the link over which bytes leave the accelerator of a rank."""
        return self.links_out[rank] if self.links_out else self._on_network.out

    def send(self, kind: Kind, name: str, stage: int, moved: int, link: int, after: list[int]) -> int:
        """Add a transfer between memory and an accelerator; return the number of its task.

        Args:
            kind: its purpose.
            name: what is sent.
            stage: index of the stage.
            moved: bytes.
            link: the link that carries them.
            after: tasks that must have ended before it.
        """
        assert self.machines.link_bytes_per_s is not None, "accelerators have links"
        seconds = moved / self.machines.link_bytes_per_s
        return self.timeline.add(kind, name, stage, seconds, (link,), after, moved)

    def use_memory(
        self,
        kind: Kind,
        name: str,
        stage: int,
        moved: int,
        after: list[int],
        cores: tuple[int, ...] = (),
    ) -> int:
        """Add reads and writes of the host's memory; return the number of their task.

        Args:
            kind: its purpose.
            name: what is read or written.
            stage: index of the stage.
            moved: bytes.
            after: tasks that must have ended before it.
            cores: ranks whose cores are busy with it.
        """
        seconds = moved / self._memory_bytes_per_s
        return self.timeline.add(kind, name, stage, seconds, (*cores, self.memory), after, moved)

    @property
    def _on_network(self) -> Links:
        assert self.network is not None, "an accelerator without a link is on the network"
        return self.network
