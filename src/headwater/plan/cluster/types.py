"""What a cluster consists of: hosts that are alike, what connects them, and hosts of the weight store."""

from __future__ import annotations

import dataclasses
from typing import Literal

from headwater.core.errors import ConfigError
from headwater.plan.types import Calibration, StoreShare

Scaling = Literal["strong", "weak"]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory that holds shares of the weight store, and how fast it is.

    Attributes:
        size_bytes: bytes that a run may take.
        bytes_per_s: bytes read plus bytes written.
        adamw_params_per_s: parameters that fused AdamW updates there.
    """

    size_bytes: int
    bytes_per_s: float
    adamw_params_per_s: float


@dataclasses.dataclass(frozen=True)
class Disk:
    """A disk of a host, which reads or writes."""

    size_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """What a rank computes on, if not on cores of its host.

    Attributes:
        memory_bytes: its memory.
        link_bytes_per_s: from and to the memory of the host, each way; `None` where it hangs on the network
            instead, and weights stream to it from the store at each use.
    """

    memory_bytes: int
    link_bytes_per_s: float | None


@dataclasses.dataclass(frozen=True)
class Host:
    """One of the hosts that compute.

    Attributes:
        ranks: most compute ranks; one for each accelerator where there are any.
        memory: its memory, which all ranks see.
        flops_per_s: matrix products by precision, of all cores together or of one accelerator.
        saved_bytes_per_s: as in `Calibration`, likewise.
        accelerator: `None` where the cores compute.
        disk: `None` where there is none for the disk tier.
    """

    ranks: int
    memory: Memory
    flops_per_s: dict[str, float]
    saved_bytes_per_s: dict[str, float]
    accelerator: Accelerator | None = None
    disk: Disk | None = None


@dataclasses.dataclass(frozen=True)
class Network:
    """What connects hosts: each has one link, which sends and receives at this rate at once.

    Attributes:
        bytes_per_s: of a link, each way.
        latency_s: of a message from host to host, or to the next switch.
        fan_out: switches with so many links downwards copy what they broadcast and sum what they reduce;
            `None` where they only pass it on.
    """

    bytes_per_s: float
    latency_s: float
    fan_out: int | None = None


@dataclasses.dataclass(frozen=True)
class StoreHosts:
    """Hosts that own the masters and update them, and do not compute."""

    count: int
    memory: Memory
    disk: Disk | None = None


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster.

    Attributes:
        name: what to call it.
        hosts: how many hosts compute, at most.
        host: each of them.
        network: `None` for a single host.
        store: `None` where the hosts that compute own the masters, each its share.
    """

    name: str
    hosts: int
    host: Host
    network: Network | None = None
    store: StoreHosts | None = None

    @property
    def most_csx(self) -> int:
        """Compute ranks of the whole cluster."""
        return self.hosts * self.host.ranks


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the ranks of a run are.

    Attributes:
        cluster: the machines.
        hosts: how many of them compute.
        ranks: compute ranks of each.
    """

    cluster: Cluster
    hosts: int
    ranks: int

    @property
    def num_csx(self) -> int:
        return self.hosts * self.ranks

    @property
    def owners(self) -> int:
        """How many hosts share masters and optimizer state."""
        return self.hosts if self.cluster.store is None else self.cluster.store.count

    @property
    def device(self) -> str:
        """`cpu`, or `cuda` for an accelerator of any kind."""
        return "cpu" if self.cluster.host.accelerator is None else "cuda"

    @property
    def devices(self) -> int:
        """What computes: accelerators, or hosts, all of whose cores compute for however many ranks."""
        return self.hosts if self.cluster.host.accelerator is None else self.num_csx

    @property
    def streams_from_store(self) -> bool:
        """Whether weights come over the network at each use, and no host keeps them."""
        accelerator = self.cluster.host.accelerator
        return accelerator is not None and accelerator.link_bytes_per_s is None

    @property
    def link_bytes_per_s(self) -> float | None:
        """Of the way weights come to an accelerator."""
        host, network = self.cluster.host, self.cluster.network
        if host.accelerator is None:
            return None
        if host.accelerator.link_bytes_per_s is not None:
            return host.accelerator.link_bytes_per_s
        assert network is not None, "such an accelerator has a network"
        return network.bytes_per_s

    @property
    def share(self) -> StoreShare:
        """What of the weight store counts against the part of a host's memory that is one rank's."""
        here = 0.0 if self.streams_from_store else 1.0 / self.ranks
        state = 0.0 if self.cluster.store is not None else 1.0 / self.num_csx
        return StoreShare(wire=here, state=state, gradients=here)

    @property
    def rates(self) -> Calibration:
        """Of one rank: ranks that compute on cores have a part of them each, memory and disk are shared."""
        host = self.cluster.host
        part = 1.0 if host.accelerator is not None else 1.0 / self.ranks
        flops = {f"{name}_flops_per_s": rate * part for name, rate in host.flops_per_s.items()}
        saved = {f"{name}_saved_bytes_per_s": rate * part for name, rate in host.saved_bytes_per_s.items()}
        return Calibration(
            **flops,
            **saved,
            memory_bytes_per_s=host.memory.bytes_per_s,
            adamw_params_per_s=host.memory.adamw_params_per_s,
            link_bytes_per_s=self.link_bytes_per_s,
            disk_read_bytes_per_s=host.disk.read_bytes_per_s if host.disk else None,
            disk_write_bytes_per_s=host.disk.write_bytes_per_s if host.disk else None,
        )


def place(cluster: Cluster, num_csx: int) -> Placement:
    """On as few hosts as hold them, the same number on each.

    Raises:
        ConfigError: if the cluster has not so many, or they cannot be divided evenly.
    """
    if num_csx > cluster.most_csx:
        raise ConfigError(
            f"{num_csx} CSXs are asked for, and {cluster.name} has {cluster.most_csx}",
            remedy=f"write at most {cluster.most_csx}",
        )
    hosts = -(-num_csx // cluster.host.ranks)
    if num_csx % hosts:
        full = num_csx // cluster.host.ranks * cluster.host.ranks
        raise ConfigError(
            f"{num_csx} CSXs cannot be divided evenly among {hosts} hosts of {cluster.host.ranks}",
            remedy=f"write {full} or {full + cluster.host.ranks}",
        )
    return Placement(cluster, hosts, num_csx // hosts)
