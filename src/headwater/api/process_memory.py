"""The memory of the process that belongs to its models, streamed or not; a new plan depends on it."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from headwater.api.registry import compiled_models
from headwater.plan.machine import weight_bytes
from headwater.plan.memory.process import OTHER_MOMENTS, bytes_in_step
from headwater.plan.types import OthersBytes, ProcessMemory

if TYPE_CHECKING:
    from headwater.api.engine_swap import ReplaceableEngine

_PROGRAM = "interpreter"


def process_memory(planned: ReplaceableEngine, device: str, *, is_limited: bool) -> ProcessMemory:
    """Return the memory of this process that belongs to its models.

    Args:
        planned: the engine of the model that gets a new plan.
        device: the device that computes: `cpu` or `cuda`.
        is_limited: True if the user has limited the memory of the device. Otherwise the limit is the memory
            that is free now, so what is allocated already does not count.
    """
    if len(compiled_models()) > 1:
        gc.collect()  # models that the script has dropped may wait to be freed
    others = [model.current for model in compiled_models() if model.current is not planned]
    engines = [other.engine for other in others if other.engine is not None]
    predicted = [(engine.plan.predicted, engine.executor.is_idle) for engine in engines]
    on_device = _sum((found.device_parts, idle) for found, idle in predicted)
    if device != "cpu" and not is_limited:
        on_device = on_device.beyond(torch.cuda.memory_allocated(device))
    return ProcessMemory(
        initial=0 if planned.engine is not None else weight_bytes(planned.model),
        waiting=sum(weight_bytes(other.model) for other in others if other.engine is None),
        host=_sum((found.host_parts, idle) for found, idle in predicted),
        device=on_device,
    )


def _sum(models: Iterable[tuple[Mapping[str, int], bool]]) -> OthersBytes:
    """Return the bytes that several models occupy.

    Args:
        models: for each model its predicted bytes by purpose, and true if no step of it runs.
    """
    held, in_step, programs = 0, 0, []
    for parts, is_idle in models:
        programs.append(parts.get(_PROGRAM, 0))
        held += sum(size for part, size in parts.items() if part not in (_PROGRAM, *OTHER_MOMENTS))
        if is_idle:
            step = bytes_in_step(parts)
            held, in_step = held - step, max(in_step, step)
    # The first model was planned when the process was smallest.
    return OthersBytes(held + min(programs, default=0), in_step)
