"""The part of a plan on which a weight store depends."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from headwater.core.stage import StageSpec
from headwater.plan.types import Plan
from headwater.store.in_backward import BackwardSchedule


@dataclasses.dataclass(frozen=True)
class StoreSettings:
    """The part of a plan on which a weight store depends. Plans with equal settings can use the same store.

    Attributes:
        stages: the stages.
        on_device: indices of the stages in device memory.
        in_host_memory: indices of the stages in host memory.
        on_disk: indices of the stages on disk.
        folder: folder of the files; `None` if nothing is on disk.
        gradients_on_disk: true if gradients are kept on disk until the update.
        sum_dtype: see `ParamSpec.sum_dtype`.
        shares_slabs: true if the ranks of a host share slabs.
        user_loop: true if the user's own loop trains.
        backward_schedule: when and by which thread stages are updated in backward; `None` if stages are
            updated when they are fetched.
    """

    stages: tuple[StageSpec, ...]
    on_device: tuple[int, ...]
    in_host_memory: tuple[int, ...]
    on_disk: tuple[int, ...]
    folder: Path | None
    gradients_on_disk: bool
    sum_dtype: torch.dtype | None
    shares_slabs: bool
    user_loop: bool
    backward_schedule: BackwardSchedule | None

    @classmethod
    def of(cls, plan: Plan) -> StoreSettings:
        """Return the settings of a plan's store."""
        gradients_on_disk = plan.gradient_tier == "disk"
        return cls(
            stages=plan.trace.stages,
            on_device=plan.on_device,
            in_host_memory=plan.in_host_memory,
            on_disk=plan.on_disk,
            folder=plan.folder if plan.on_disk or gradients_on_disk else None,
            gradients_on_disk=gradients_on_disk,
            sum_dtype=torch.float32 if plan.precision.mixed and not plan.holds_exact_gradients else None,
            shares_slabs=plan.shares_slabs,
            user_loop=plan.user_loop,
            backward_schedule=_backward_schedule(plan) if plan.updates == "in_backward" else None,
        )


def _backward_schedule(plan: Plan) -> BackwardSchedule:
    # On a CPU, updates of stages in memory need the cores that run the model. Only updates of stages on disk
    # gain from another thread, which waits for the disk.
    on_cpu = plan.device == "cpu"
    return BackwardSchedule(
        plan.trace.uses,
        computing=frozenset(plan.in_host_memory if on_cpu else ()),
        left_out=frozenset(plan.on_device),
        on_cpu=on_cpu,
    )
