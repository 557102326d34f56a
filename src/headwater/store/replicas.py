"""Equal weights at the start of a run: on all hosts, and in the replicas of all ranks."""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from headwater.core.buffers import aligned_empty
from headwater.core.errors import StoreError
from headwater.fabric.fabric import PIECE_BYTES, Fabric
from headwater.store.tier import all_pages

if TYPE_CHECKING:
    from headwater.fabric.link import Link
    from headwater.store.store import WeightStore

logger = logging.getLogger(__name__)


def take_from_first_host(store: WeightStore, fabric: Fabric) -> None:
    """Copy masters and optimizer state from the first host to all others. All ranks call this together.

    Args:
        store: the store of this host, whose values were just set.
        fabric: the ranks of all hosts.
    """
    link = fabric.connect("the first weights")
    if link is not None:
        for stage in store.stages:
            if _take_stage(store, stage.index, link):
                logger.warning(
                    "hosts began with different values of stage %r: those of the first are taken", stage.name
                )
        link.close()
    # The other ranks of a host must not read before their leader has received.
    fabric.barrier("the first weights of all hosts")


def checksum(values: torch.Tensor, before: int = 0) -> int:
    """Return the CRC-32 of values in host memory, continued from the checksum of other values."""
    return zlib.crc32(values.detach().contiguous().view(-1).view(torch.uint8).numpy().data, before)


def refuse_unequal_replicas(fabric: Fabric, device: str, checksums: Mapping[str, int]) -> None:
    """Raise if replicas of ranks would differ. All ranks call this together.

    Args:
        fabric: the ranks.
        device: the product name of this rank's device. Other products may round updates differently.
        checksums: stage -> checksum of the first weights of this rank's replica.

    Raises:
        StoreError: if a rank has another device or other weights than the first rank.
    """
    devices = fabric.gather_objects(device, str)
    every = fabric.gather_objects(dict(checksums), dict[str, int])
    for rank, (its_device, its_checksums) in enumerate(zip(devices, every, strict=True)):
        if its_device != devices[0]:
            raise StoreError(
                f"expected equal devices on all ranks, found {devices[0]} on rank 0 "
                f"and {its_device} on rank {rank}",
                remedy="write stages_on_device: 0, so that no stage is updated in device memory",
            )
        different = [name for name, value in its_checksums.items() if value != every[0][name]]
        if different:
            raise StoreError(
                f"expected equal initial weights on all ranks, but those of ranks 0 and {rank} differ",
                where=f"stage {different[0]!r}",
                remedy="make the weights from the same seed on each rank, or write stages_on_device: 0",
            )


def _take_stage(store: WeightStore, stage: int, link: Link) -> bool:
    """Make a stage equal to the first host's. Return true if its bytes were different on some host."""
    layout, tier = store.tier.layouts[stage], store.tier
    buffer = None if tier.resident_wire(stage) is not None else aligned_empty(layout.wire_bytes)
    with tier.wire(stage, buffer, write=True) as image:
        differ = [_send_where_different(link, image)]
    for _, rest in tier.groups(stage, layout.groups, write=all_pages):
        differ.append(_send_where_different(link, rest))
    return any(differ)


def _send_where_different(link: Link, image: torch.Tensor) -> bool:
    """Send the first host's bytes to the others, unless all hosts have the same. Return true if sent."""
    # Equal hosts, the usual case, send 8 bytes instead of all weights.
    digest = hashlib.blake2b(image.numpy().data, digest_size=8).digest()
    if len(link.gather(torch.frombuffer(bytearray(digest), dtype=torch.int64)).unique()) == 1:
        return False
    for piece in image.split(PIECE_BYTES):
        for host in range(1, link.num_hosts):
            if link.host == 0:
                link.send(piece, host)
            elif link.host == host:
                link.receive(piece, 0)
    return True
