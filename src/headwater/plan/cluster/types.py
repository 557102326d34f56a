"""Parts of a cluster: equal compute hosts, the network between them, and hosts of the weight store."""

from __future__ import annotations

import dataclasses
from typing import Literal

from headwater.core.errors import ConfigError
from headwater.core.placement import check_csx_limit
from headwater.plan.rates import Calibration
from headwater.plan.types import StoreShare

Scaling = Literal["strong", "weak"]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory that holds shares of the weight store, with its rates.

    Attributes:
        size_bytes: bytes that a run may use.
        bytes_per_s: bytes read plus bytes written per second.
        adamw_params_per_s: parameters that fused AdamW updates there per second.
    """

    size_bytes: int
    bytes_per_s: float
    adamw_params_per_s: float


@dataclasses.dataclass(frozen=True)
class Disk:
    """A disk of a host. It does not read and write at the same time."""

    size_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """A device on which a rank computes, if not on cores of its host.

    Attributes:
        memory_bytes: its memory.
        link_bytes_per_s: rate from and to the memory of the host, each way; `None` if it is on the network
            instead, and weights stream to it from the store at each use.
    """

    memory_bytes: int
    link_bytes_per_s: float | None


@dataclasses.dataclass(frozen=True)
class Host:
    """One of the compute hosts.

    Attributes:
        ranks: maximum number of compute ranks; with accelerators, one for each.
        memory: its memory, which all ranks share.
        flops_per_s: matrix products by precision, for all cores together or for one accelerator.
        saved_bytes_per_s: as in `Calibration`, for all cores together or for one accelerator.
        attention_flops_per_s: fused attention by precision, as `flops_per_s`; empty if it has the rate of
            matrix products.
        accelerator: `None` if the cores compute.
        disk: `None` if it has no disk for the disk tier.
    """

    ranks: int
    memory: Memory
    flops_per_s: dict[str, float]
    saved_bytes_per_s: dict[str, float]
    accelerator: Accelerator | None = None
    disk: Disk | None = None
    attention_flops_per_s: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Network:
    """The network between hosts. Each host has one link, which can send and receive at the same time.

    Attributes:
        bytes_per_s: rate of a link, each way.
        latency_s: seconds that a message takes from host to host, or to the next switch.
        fan_out: number of links of a switch downwards; such switches copy broadcasts and sum reductions.
            `None` if switches only forward.
    """

    bytes_per_s: float
    latency_s: float
    fan_out: int | None = None


@dataclasses.dataclass(frozen=True)
class StoreHosts:
    """Hosts that own the masters and update them, but do not compute."""

    count: int
    memory: Memory
    disk: Disk | None = None


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A description of a cluster: its equal compute hosts, their network, and the weight store.

    Attributes:
        name: the name of the cluster.
        hosts: maximum number of compute hosts.
        host: description of each of them.
        network: `None` for a single host.
        store: `None` if the compute hosts own the masters, each its share.
    """

    name: str
    hosts: int
    host: Host
    network: Network | None = None
    store: StoreHosts | None = None

    @property
    def most_csx(self) -> int:
        """Maximum number of compute ranks."""
        return self.hosts * self.host.ranks


@dataclasses.dataclass(frozen=True)
class Machines:
    """The hosts of a cluster that a run uses, and its ranks on them.

    Attributes:
        cluster: the cluster.
        hosts: number of compute hosts.
        ranks: compute ranks of each host.
    """

    cluster: Cluster
    hosts: int
    ranks: int

    @property
    def num_csx(self) -> int:
        return self.hosts * self.ranks

    @property
    def owners(self) -> int:
        """Number of hosts among which masters and optimizer state are divided."""
        return self.hosts if self.cluster.store is None else self.cluster.store.count

    @property
    def device(self) -> str:
        """`cpu`, or `cuda` for an accelerator of any kind."""
        return "cpu" if self.cluster.host.accelerator is None else "cuda"

    @property
    def devices(self) -> int:
        """Number of accelerators. If the cores of hosts compute, the number of hosts."""
        return self.hosts if self.cluster.host.accelerator is None else self.num_csx

    @property
    def streams_from_store(self) -> bool:
        """True if weights come over the network at each use, and compute hosts do not store them."""
        accelerator = self.cluster.host.accelerator
        return accelerator is not None and accelerator.link_bytes_per_s is None

    @property
    def link_bytes_per_s(self) -> float | None:
        """Bytes per second at which an accelerator receives weights; `None` if cores compute."""
        host, network = self.cluster.host, self.cluster.network
        if host.accelerator is None:
            return None
        if host.accelerator.link_bytes_per_s is not None:
            return host.accelerator.link_bytes_per_s
        assert network is not None, "such an accelerator has a network"
        return network.bytes_per_s

    @property
    def share(self) -> StoreShare:
        """The part of the weight store that counts against one rank's share of a host's memory."""
        here = 0.0 if self.streams_from_store else 1.0 / self.ranks
        state = 0.0 if self.cluster.store is not None else 1.0 / self.num_csx
        return StoreShare(wire=here, state=state, gradients=here)

    @property
    def rates(self) -> Calibration:
        """The rates of one rank. Ranks on cores divide the FLOPs of the cores, but share all other rates."""
        host = self.cluster.host
        part = 1.0 if host.accelerator is not None else 1.0 / self.ranks
        flops = {f"{name}_flops_per_s": rate * part for name, rate in host.flops_per_s.items()}
        saved = {f"{name}_saved_bytes_per_s": rate * part for name, rate in host.saved_bytes_per_s.items()}
        attention = {
            f"{name}_attention_flops_per_s": rate * part for name, rate in host.attention_flops_per_s.items()
        }
        return Calibration(
            **flops,
            **saved,
            **attention,
            memory_bytes_per_s=host.memory.bytes_per_s,
            adamw_params_per_s=host.memory.adamw_params_per_s,
            link_bytes_per_s=self.link_bytes_per_s,
            disk_read_bytes_per_s=host.disk.read_bytes_per_s if host.disk else None,
            disk_write_bytes_per_s=host.disk.write_bytes_per_s if host.disk else None,
        )


def place(cluster: Cluster, num_csx: int) -> Machines:
    """Divide ranks evenly among the fewest hosts that have room for them; raise if that is not possible.

    Raises:
        ConfigError: if the cluster has too few ranks, or they cannot be divided evenly.
    """
    check_csx_limit(num_csx, cluster.most_csx, f"CSXs of {cluster.name}", where="num_csx")
    # The fewest hosts: the ranks of one host share its memory, and other ranks need the network.
    hosts = -(-num_csx // cluster.host.ranks)
    if num_csx % hosts:
        full = num_csx // cluster.host.ranks * cluster.host.ranks
        raise ConfigError(
            f"{num_csx} CSXs cannot be divided evenly among {hosts} hosts of at most {cluster.host.ranks}",
            remedy=f"write {full} or {full + cluster.host.ranks}",
        )
    return Machines(cluster, hosts, num_csx // hosts)
