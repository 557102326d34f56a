"""Cluster files: what `headwater plan --cluster` is told of machines that one has not got."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from headwater.config.base import Bytes, Section
from headwater.config.files import find_file
from headwater.config.run import read_section
from headwater.config.yaml_reader import read_document
from headwater.core.errors import ConfigError
from headwater.core.units import parse_rate

_SHIPPED = Path(__file__).resolve().parents[1] / "assets" / "clusters"


def _rate(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return parse_rate(value)
        except ConfigError as error:
            raise PydanticCustomError(
                "size", "{what}", {"what": error.what, "remedy": error.remedy}
            ) from error
    return value


Rate = Annotated[float, BeforeValidator(_rate), Field(gt=0)]
"""Bytes a second: `50 GB/s`, `100 Gbit/s` or a number."""
Positive = Annotated[float, Field(gt=0)]
Size = Bytes


class MemorySection(Section):
    """Memory of a host.

    Attributes:
        size: bytes that a run may take.
        bytes_per_s: bytes read plus bytes written.
        adamw_params_per_s: parameters that fused AdamW updates there.
    """

    size: Size
    bytes_per_s: Rate
    adamw_params_per_s: Positive


class DiskSection(Section):
    """A disk: bytes that a run may take there, and its rates."""

    size: Size
    read_bytes_per_s: Rate
    write_bytes_per_s: Rate


class ByPrecision(Section):
    """A number for each precision."""

    fp32: Positive
    bf16: Positive
    fp16: Positive


class SavedRates(Section):
    """A rate for each precision."""

    fp32: Rate
    bf16: Rate
    fp16: Rate


class AcceleratorSection(Section):
    """What each rank computes on, if not on cores.

    Attributes:
        memory: its memory.
        link_bytes_per_s: to the memory of its host and back, each way; without one it hangs on the network.
    """

    memory: Size
    link_bytes_per_s: Rate | None = None


class HostSection(Section):
    """One of the hosts that compute.

    Attributes:
        ranks: most compute ranks of a host; the number of its accelerators, if it has any.
        memory: its memory.
        flops_per_s: matrix products, of all cores together or of one accelerator.
        saved_bytes_per_s: bytes that autograd saves in forward, by the time that forward and backward take
            beyond matrix products; likewise.
        accelerator: absent where the cores compute.
        disk: for the disk tier.
    """

    ranks: int = Field(ge=1)
    memory: MemorySection
    flops_per_s: ByPrecision
    saved_bytes_per_s: SavedRates
    accelerator: AcceleratorSection | None = None
    disk: DiskSection | None = None


class NetworkSection(Section):
    """What connects the hosts.

    Attributes:
        bytes_per_s: of the link of a host, each way.
        latency_s: from host to host, or to the next switch.
        fan_out: links of a switch downwards, where switches copy weights and sum gradients.
    """

    bytes_per_s: Rate
    latency_s: Annotated[float, Field(ge=0)]
    fan_out: Annotated[int | None, Field(ge=2)] = None


class StoreSection(Section):
    """Hosts that own masters and optimizer state, and do not compute."""

    hosts: int = Field(ge=1)
    memory: MemorySection
    disk: DiskSection | None = None


class ClusterFile(Section):
    """A cluster file.

    Attributes:
        description: what it is, and where the numbers are from.
        hosts: hosts that compute, at most.
        host: each of them.
        network: what connects them.
        store: hosts of the weight store; without it those that compute own the masters.
    """

    description: str
    hosts: int = Field(ge=1)
    host: HostSection
    network: NetworkSection | None = None
    store: StoreSection | None = None

    @model_validator(mode="after")
    def _what_is_apart_is_connected(self) -> Self:
        if self.network is None and (self.hosts > 1 or self.store is not None):
            raise ValueError("several hosts, or a store, need a network: {bytes_per_s: …, latency_s: …}")
        if self.store is None and self.network is not None and self.network.fan_out is not None:
            raise ValueError("switches that sum (fan_out) need hosts of a store to sum for: add store")
        accelerator = self.host.accelerator
        if accelerator is not None and accelerator.link_bytes_per_s is None:
            if self.store is None:
                raise ValueError(
                    "an accelerator without link_bytes_per_s gets its weights from a store: add store"
                )
            if self.host.ranks > 1:
                raise ValueError(
                    "an accelerator without link_bytes_per_s is a host of its own: write ranks: 1"
                )
        return self


def shipped_clusters() -> dict[str, Path]:
    """The cluster files that ship with the package, by name."""
    return {file.stem: file for file in sorted(_SHIPPED.glob("*.yaml"))}


def find_cluster(name_or_path: str | Path) -> Path:
    """The cluster file that `name_or_path` means: a file, or the name of one that ships.

    Raises:
        ConfigError: if there is neither.
    """
    return find_file(name_or_path, shipped_clusters(), "cluster file", where="--cluster")


def load_cluster(name_or_path: str | Path) -> ClusterFile:
    """The cluster that a file describes.

    Raises:
        ConfigError: if there is no such file or anything in it is wrong, with line, key and what to write.
    """
    return read_section(ClusterFile, read_document(find_cluster(name_or_path), "cluster"), ())[0]
