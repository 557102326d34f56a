"""Bytes of the weight store on the host: in memory, in its buffers, and on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from headwater.plan.memory.stages import (
    FP32_BYTES,
    StageBytes,
    counted_bytes,
    largest_state_of_an_element,
)
from headwater.plan.types import Plan, StoreShare
from headwater.store.layout import GROUP_BYTES, PIECE_ELEMENTS, STAGING_BUFFERS


@final
class StoreMemory:
    """Bytes of the weight store of one dry run that count against a rank's budgets.

    Args:
        stages: bytes of each stage.
        share: the part of the store that counts.
        compute_ranks: number of ranks of this host that compute.
        update_tensors: number of fp32 tensors that an update in host memory makes for each piece.
    """

    def __init__(
        self, stages: Sequence[StageBytes], *, share: StoreShare, compute_ranks: int, update_tensors: int
    ) -> None:
        self._stages, self._share, self._ranks = stages, share, compute_ranks
        self._total = counted_bytes(stages, share)
        self._largest_slab = max(stage.slab for stage in stages)
        self._buffers = _group_buffers(stages) + update_tensors * PIECE_ELEMENTS * FP32_BYTES

    def in_host_memory(self, plan: Plan) -> dict[str, int]:
        """Return the bytes of stages in host memory, and of the buffers through which those on disk go."""
        if plan.tier == "memory":
            return {"weight store": self._total - self._on_device(plan)}
        readers, images = self._share.disk_ranks, self._share.images
        if plan.device != "cpu":  # each rank reads for itself, through page-locked memory
            readers = max(readers, self._ranks + self._share.store_ranks)
            images += self._ranks
        staging = readers * self._buffers + images * self._largest_slab
        held = {"weight store": self._in_memory(plan)} if plan.in_memory else {}
        return held | {"staging": staging}

    def on_disk(self, plan: Plan) -> dict[str, int]:
        """Return the bytes of the stages on disk; nothing if the plan has no disk tier."""
        if plan.tier == "memory":
            return {}
        return {"weight store": self._total - self._in_memory(plan) - self._on_device(plan)}

    def _in_memory(self, plan: Plan) -> int:
        return counted_bytes((self._stages[stage] for stage in plan.in_memory), self._share)

    def _on_device(self, plan: Plan) -> int:
        # No share is applied: with stages in device memory a host has the whole store; see [Note: replicas].
        return sum(self._stages[stage].stored for stage in plan.on_device)


def _group_buffers(stages: Sequence[StageBytes]) -> int:
    """Return the bytes of a disk tier's buffers: each holds the largest group (`store/disk.py`).

    A group has whole pieces, and as many as exceed `GROUP_BYTES`, but no more than its stage has.
    """
    piece = max(1, int(PIECE_ELEMENTS * largest_state_of_an_element(stages)))
    group = -(-GROUP_BYTES // piece) * piece
    return STAGING_BUFFERS * min(group, max(stage.state for stage in stages))
