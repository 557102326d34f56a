"""Plans and simulates the step of one number of CSXs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from headwater.core.precision import Precision
from headwater.core.units import MIB
from headwater.plan.budget import make_plan
from headwater.plan.cluster.owners import store_tier
from headwater.plan.cluster.parts import mean_parts
from headwater.plan.cluster.step import Step, simulate_step
from headwater.plan.cluster.types import Placement
from headwater.plan.footprint import Footprint
from headwater.plan.predict import Predictor
from headwater.plan.search import Fixed, TraceFor
from headwater.plan.types import Plan, Resources

_BASE_BYTES = 512 * MIB
"""Host memory of the interpreter and its libraries, for each rank."""
_DISK = Path("disk")


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one step, for any number of ranks.

    Attributes:
        trace_for: number of samples -> its dry run.
        precision: precision of the run.
        optimizer_state_bytes: bytes of optimizer state for each trained parameter.
        fixed: decisions that the user has made.
        device_memory: bytes of an accelerator that a rank may use; `None`: all of them.
    """

    trace_for: TraceFor
    precision: Precision
    optimizer_state_bytes: int
    fixed: Fixed = dataclasses.field(default_factory=Fixed)
    device_memory: int | None = None


@dataclasses.dataclass(frozen=True)
class Point:
    """A simulated step of one number of CSXs.

    Attributes:
        placement: where the ranks are.
        batch_size: samples of all ranks together.
        plan: of each rank.
        step: the simulated step.
        parts: seconds of the step of an average rank, by kind of work.
    """

    placement: Placement
    batch_size: int
    plan: Plan
    step: Step
    parts: dict[str, float]

    @property
    def num_csx(self) -> int:
        return self.placement.num_csx

    @property
    def samples_per_s(self) -> float:
        return self.batch_size / self.step.step_s


def simulate_point(work: Work, placement: Placement, batch_size: int) -> Point:
    """Make a plan for one rank of a placement, and simulate the step of all of them.

    Args:
        work: the work of the step.
        placement: where the ranks are.
        batch_size: samples of a step of all ranks, a multiple of their number.

    Returns:
        The simulated step.

    Raises:
        ConfigError: if decisions contradict each other or the batch size.
        DoesNotFitError: if no plan fits.
    """
    plan = make_plan(
        work.trace_for,
        batch_size=batch_size // placement.num_csx,
        precision=work.precision,
        optimizer_state_bytes=work.optimizer_state_bytes,
        resources=_resources(work, placement),
        device=placement.device,
        calibration=placement.rates,
        fixed=work.fixed,
        base_bytes=_BASE_BYTES,
        share=placement.share,
    )
    footprint = Footprint(
        plan.trace,
        optimizer_state_bytes=work.optimizer_state_bytes,
        base_bytes=_BASE_BYTES,
        share=placement.share,
    )
    if placement.cluster.store is not None:
        store_tier(footprint, placement)
    step = simulate_step(plan, Predictor(footprint, placement.rates), placement)
    return Point(placement, batch_size, plan, step, mean_parts(step.timeline, step.ranks))


def _resources(work: Work, placement: Placement) -> Resources:
    """Return one rank's part of its host."""
    host, accelerator = placement.cluster.host, placement.cluster.host.accelerator
    device_memory = None
    if accelerator is not None:
        device_memory = min(accelerator.memory_bytes, work.device_memory or accelerator.memory_bytes)
    disk = host.disk if placement.cluster.store is None else None
    return Resources(
        device_memory=device_memory,
        host_memory=host.memory.size_bytes // placement.ranks,
        disk=_DISK if disk else None,
        disk_bytes=disk.size_bytes // placement.ranks if disk else None,
    )


def efficiency(first: Point, point: Point) -> float:
    """Return the samples per second of each device, relative to the smallest of the simulated runs."""
    return (point.samples_per_s / first.samples_per_s) / (point.placement.devices / first.placement.devices)
