"""Memory that an update needs beside the pieces of its stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING

from headwater.core.stage import StageSpec
from headwater.plan.memory.stages import FP32_BYTES, HALF_BYTES
from headwater.plan.step_trace import Trace

if TYPE_CHECKING:
    from headwater.optim.spec import UpdateKind

_KERNEL_TENSORS: Mapping[UpdateKind, int] = {"fused": 0, "pieces": 6, "whole": 6}
"""fp32 tensors that an update without a fused kernel adds on a device: 2 copies to undo it, 4 temporary."""


@dataclasses.dataclass(frozen=True)
class UpdateSpace:
    """fp32 tensors that an update makes for each piece, or for each batch of pieces on a device.

    Attributes:
        host_tensors: number of such tensors for an update in host memory.
        device_tensors: number of such tensors for an update in device memory.
        uncut: for each stage the elements of its largest parameter that is updated as a whole.
    """

    host_tensors: int
    device_tensors: int
    uncut: tuple[int, ...]


def update_space(trace: Trace, optimizer_state_bytes: float, update_kind: UpdateKind) -> UpdateSpace:
    """Return the memory that updates of a dry run's stages need; `TorchPieces` allocates it.

    Args:
        trace: the dry run.
        optimizer_state_bytes: bytes of optimizer state for each trained parameter, as it is stored.
        update_kind: how the optimizer updates on the device.
    """
    narrow = any(param.bf16_state for param in trace.params)
    trained = [param for param in trace.params if param.requires_grad]
    all_half = all(param.dtype.itemsize == HALF_BYTES for param in trained)  # their states have their dtype
    # The number of state tensors. It is rounded up, because the bytes are a mean over all parameters.
    states = ceil(optimizer_state_bytes / (HALF_BYTES if narrow or all_half else FP32_BYTES))
    # Each piece has a master, a gradient, and fp32 copies of the state tensors that are stored in bf16.
    on_host = 2 + (states if narrow else 0)
    # The device needs more: the first update makes the state, and a later update keeps copies of the state to
    # be undone.
    on_device = on_host + states + _KERNEL_TENSORS[update_kind]
    uncut = tuple(_largest_uncut(stage, update_kind) for stage in trace.stages)
    return UpdateSpace(on_host, on_device, uncut)


def _largest_uncut(stage: StageSpec, update_kind: UpdateKind) -> int:
    """Return the elements of the largest parameter of a stage that is not updated piece by piece."""
    trained = (param for param in stage.params if param.requires_grad)
    sizes = (param.numel for param in trained if update_kind == "whole" or param.strides is not None)
    return max(sizes, default=0)
