"""Host memory of a checkpoint that is written during training (`store/snapshot.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from headwater.core.checked_files import BEHIND_BYTES
from headwater.core.transfers import BUFFER_BYTES
from headwater.plan.memory.masks import expanded_bytes
from headwater.plan.memory.stages import FP32_BYTES, StageBytes, largest_state_of_an_element
from headwater.plan.step_trace import Trace
from headwater.plan.types import Plan
from headwater.store.layout import DEVICE_PIECE_ELEMENTS, GROUP_BYTES, PIECE_ELEMENTS

_THREADS = 2
"""Threads that save a stage at the same time: that of the checkpoint, and one that is about to update it."""


@final
class SnapshotMemory:
    """Bytes of host memory in which checkpoints read and write the stages of one dry run.

    Args:
        trace: the dry run.
        stages: bytes of each stage.
    """

    def __init__(self, trace: Trace, stages: Sequence[StageBytes]) -> None:
        self._stages = stages
        expanded = _THREADS * expanded_bytes(trace, largest_state_of_an_element(stages))
        self._writing = _writing_bytes(trace) + expanded
        self._from_disk = _copies_from_disk(stages) + self._writing

    def of(self, plan: Plan) -> int:
        """Return the bytes that a checkpoint of a plan's store needs.

        Stages in host memory are written from where they are. Those on disk and in device memory are copied
        to host memory first. Both kinds share the threads that save, so the larger copies count.
        """
        copies = _copies_from_device([self._stages[stage] for stage in plan.on_device])
        from_device = copies + self._writing
        return from_device if plan.tier == "memory" else max(self._from_disk, from_device)


def _copies_from_disk(stages: Sequence[StageBytes]) -> int:
    """Return the bytes of the wire images that are in memory at once when stages on disk are saved.

    One stage is saved in the background, and another by a thread that is about to update it. Each has two
    pieces in fp32 beside the image of its stage.
    """
    pieces = _THREADS * 2 * PIECE_ELEMENTS * FP32_BYTES
    return sum(sorted(stage.slab for stage in stages)[-_THREADS:]) + pieces


def _copies_from_device(held: Sequence[StageBytes]) -> int:
    """Return the bytes of host memory in which a checkpoint reads stages from device memory.

    Args:
        held: the stages in device memory.
    """
    if not held:
        return 0
    # The last piece of a group makes it larger than the least size of a group.
    group = GROUP_BYTES + int(DEVICE_PIECE_ELEMENTS * largest_state_of_an_element(held))
    largest = sorted(stage.slab + min(stage.state, group) for stage in held)[-_THREADS:]
    piece = min(DEVICE_PIECE_ELEMENTS, max(stage.trained for stage in held))
    return sum(largest) + len(largest) * piece * FP32_BYTES


def _writing_bytes(trace: Trace) -> int:
    """Return the bytes of the buffers through which checkpoints are written; small parameters need none."""
    is_large = any(param.numel * FP32_BYTES >= BEHIND_BYTES for param in trace.params)
    return BUFFER_BYTES if is_large else 0
