"""Cluster files, which describe the machines that `headwater plan --cluster` simulates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from headwater.config.base import Bytes, Section, SectionError, parsed
from headwater.config.files import find_file
from headwater.config.run import read_section
from headwater.config.yaml_reader import read_document
from headwater.core.units import parse_rate

_SHIPPED = Path(__file__).resolve().parents[1] / "assets" / "clusters"


def _rate(value: Any) -> Any:
    return parsed(parse_rate, value) if isinstance(value, str) else value


Rate = Annotated[float, BeforeValidator(_rate), Field(gt=0)]
"""Bytes per second: `50 GB/s`, `100 Gbit/s` or a number."""
Positive = Annotated[float, Field(gt=0)]
Size = Bytes


class MemorySection(Section):
    """The memory of a host.

    Attributes:
        size: bytes that a run may use.
        bytes_per_s: memory bandwidth, bytes read plus bytes written per second.
        adamw_params_per_s: parameters that fused AdamW updates per second in this memory.
    """

    size: Size
    bytes_per_s: Rate
    adamw_params_per_s: Positive


class DiskSection(Section):
    """A disk: the bytes that a run may use, and its rates."""

    size: Size
    read_bytes_per_s: Rate
    write_bytes_per_s: Rate


class ByPrecision(Section):
    """One number for each precision of the computation."""

    fp32: Positive
    bf16: Positive
    fp16: Positive


class SavedRates(Section):
    """One rate for each precision of the computation, in bytes per second."""

    fp32: Rate
    bf16: Rate
    fp16: Rate


class AcceleratorSection(Section):
    """The accelerator of a rank.

    Attributes:
        memory: its memory.
        link_bytes_per_s: rate between it and the memory of its host, in each direction. Without this key the
            accelerator is connected to the network directly.
    """

    memory: Size
    link_bytes_per_s: Rate | None = None


class HostSection(Section):
    """A host that computes.

    Attributes:
        ranks: largest number of compute ranks on a host; the number of its accelerators, if it has any.
        memory: its memory.
        flops_per_s: rate of matrix products, of all cores together or of one accelerator.
        saved_bytes_per_s: rate of all other operations, of all cores together or of one accelerator: bytes
            that autograd saves in forward, divided by the time of forward and backward without the matrix
            products and attention.
        attention_flops_per_s: rate of fused attention, as that of matrix products; absent if it is equal.
        accelerator: accelerator of each rank; absent if the CPU cores compute.
        disk: disk for the disk tier.
    """

    ranks: int = Field(ge=1)
    memory: MemorySection
    flops_per_s: ByPrecision
    saved_bytes_per_s: SavedRates
    attention_flops_per_s: ByPrecision | None = None
    accelerator: AcceleratorSection | None = None
    disk: DiskSection | None = None


class NetworkSection(Section):
    """The network that connects the hosts.

    Attributes:
        bytes_per_s: rate of a host's link, in each direction.
        latency_s: latency from host to host, or to the next switch.
        fan_out: number of downward links of a switch, if switches copy weights and sum gradients.
    """

    bytes_per_s: Rate
    latency_s: Annotated[float, Field(ge=0)]
    fan_out: Annotated[int | None, Field(ge=2)] = None


class StoreSection(Section):
    """The hosts of the weight store. They hold fp32 weights and optimizer state, and do not compute."""

    hosts: int = Field(ge=1)
    memory: MemorySection
    disk: DiskSection | None = None


class ClusterFile(Section):
    """The content of a cluster file: the hosts and network of a cluster that the planner simulates.

    Attributes:
        description: description of the cluster, with the source of the numbers.
        hosts: largest number of hosts that compute.
        host: description of each of these hosts.
        network: the network that connects the hosts.
        store: the hosts of the weight store; without this key the computing hosts hold the masters.
    """

    description: str
    hosts: int = Field(ge=1)
    host: HostSection
    network: NetworkSection | None = None
    store: StoreSection | None = None

    @model_validator(mode="after")
    def _parts_are_connected(self) -> Self:
        if self.network is None and (self.hosts > 1 or self.store is not None):
            raise SectionError(
                "expected a network for several hosts or a store, found none",
                "add network: {bytes_per_s: …, latency_s: …}",
            )
        if self.store is None and self.network is not None and self.network.fan_out is not None:
            raise SectionError(
                "expected a store for network.fan_out, found none", "add store, or remove fan_out"
            )
        accelerator = self.host.accelerator
        if accelerator is not None and accelerator.link_bytes_per_s is None:
            if self.store is None:
                raise SectionError(
                    "expected a store for an accelerator without link_bytes_per_s, found none", "add store"
                )
            if self.host.ranks > 1:
                raise SectionError(
                    f"expected one rank for an accelerator without link_bytes_per_s, got {self.host.ranks}",
                    "write ranks: 1",
                )
        return self


def shipped_clusters() -> dict[str, Path]:
    """Return the cluster files that ship with the package, by name."""
    return {file.stem: file for file in sorted(_SHIPPED.glob("*.yaml"))}


def find_cluster(name_or_path: str | Path) -> Path:
    """Return the path of a cluster file.

    Args:
        name_or_path: path of a file, or the name of a shipped one.

    Raises:
        ConfigError: if neither exists.
    """
    return find_file(name_or_path, shipped_clusters(), "cluster file", where="--cluster")


def load_cluster(name_or_path: str | Path) -> ClusterFile:
    """Read a cluster file.

    Args:
        name_or_path: path of a file, or the name of a shipped one.

    Raises:
        ConfigError: if the file does not exist or is not valid, with line, key and what to write instead.
    """
    return read_section(ClusterFile, read_document(find_cluster(name_or_path), "cluster"), ())[0]
