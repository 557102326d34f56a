"""Bytes of the weight store in device memory."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.plan.memory.stages import FP32_BYTES, StageBytes
from headwater.store.layout import DEVICE_PIECE_ELEMENTS
from headwater.store.ties import tie_flags


def store_on_device(
    held: Sequence[StageBytes], update_tensors: int, *, uncut: int, arriving: int
) -> dict[str, int]:
    """Return the bytes of stages in device memory, and of the memory that their updates need.

    Args:
        held: the stages.
        update_tensors: number of fp32 tensors that an update makes for each batch of pieces.
        uncut: elements of the largest parameter that is updated as a whole.
        arriving: bytes of the memory in which summed gradients arrive.
    """
    if not held:
        return {}
    # A batch of pieces ends with the piece that makes it full.
    batch = DEVICE_PIECE_ELEMENTS + max(DEVICE_PIECE_ELEMENTS, uncut)
    batch = min(batch, max(stage.trained for stage in held))
    piece = min(max(DEVICE_PIECE_ELEMENTS, uncut), batch)
    flags = tie_flags(piece) if any(stage.has_ties for stage in held) else 0
    return {
        "weight store": sum(stage.stored for stage in held),
        "staging": update_tensors * batch * FP32_BYTES + flags + arriving,
    }
