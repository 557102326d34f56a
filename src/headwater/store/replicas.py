"""Equal weights on all hosts at the start of a run. Each host's store holds all weights."""

from __future__ import annotations

import hashlib
import logging

import torch

from headwater.core.buffers import aligned_empty
from headwater.fabric.fabric import PIECE_BYTES, Fabric
from headwater.fabric.link import Link
from headwater.store.store import WeightStore
from headwater.store.tier import all_pages

logger = logging.getLogger(__name__)


def take_from_first_host(store: WeightStore, fabric: Fabric) -> None:
    """Copy masters and optimizer state from the first host to all others. All ranks call this together.

    Args:
        store: of this host, just filled.
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
