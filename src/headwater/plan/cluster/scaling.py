"""The plan and the simulated step of one number of CSXs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from headwater.core.units import MIB
from headwater.plan.budget import make_plan
from headwater.plan.cluster.parts import mean_parts
from headwater.plan.cluster.step import Step, simulate_step
from headwater.plan.cluster.types import Machines
from headwater.plan.footprint import Footprint
from headwater.plan.options import PlanRequest
from headwater.plan.predict import Predictor
from headwater.plan.types import Plan, Resources

_BASE_BYTES = 512 * MIB
"""Host memory of the interpreter and its libraries, for each rank."""
_DISK = Path("disk")


@dataclasses.dataclass(frozen=True)
class Point:
    """A simulated step of one number of CSXs.

    Attributes:
        machines: the hosts and ranks of the run.
        batch_size: samples of all ranks together.
        plan: the plan of each rank.
        step: the simulated step.
        parts: seconds of the step of an average rank, by kind of work.
    """

    machines: Machines
    batch_size: int
    plan: Plan
    step: Step
    parts: dict[str, float]

    @property
    def num_csx(self) -> int:
        return self.machines.num_csx

    @property
    def samples_per_s(self) -> float:
        return self.batch_size / self.step.step_s


def simulate_point(asked: PlanRequest, machines: Machines) -> Point:
    """Make a plan for one rank, and simulate the step of all ranks.

    Args:
        asked: the step of one rank. Its resources count only as the limit of an accelerator's memory.
        machines: the hosts and ranks of the run.

    Returns:
        The simulated step.

    Raises:
        ConfigError: if decisions contradict each other or the batch size.
        DoesNotFitError: if no plan fits.
    """
    request = dataclasses.replace(
        asked,
        resources=_resources(asked.resources.device_memory, machines),
        device=machines.device,
        calibration=machines.rates,
        # The base memory is given, because that of this process says nothing about the simulated hosts.
        base_bytes=_BASE_BYTES,
        share=machines.share,
        device_tier=False,  # the simulation has the masters on hosts
    )
    plan = make_plan(request)
    footprint = Footprint(
        plan.trace,
        optimizer_state_bytes=asked.optimizer_state_bytes,
        base_bytes=_BASE_BYTES,
        share=machines.share,
    )
    step = simulate_step(plan, Predictor(footprint, machines.rates), machines)
    parts = mean_parts(step.timeline, step.ranks)
    return Point(machines, asked.batch_size * machines.num_csx, plan, step, parts)


def _resources(most_device_memory: int | None, machines: Machines) -> Resources:
    """Return the memory and disk space that one rank may use: its part of what the host has."""
    host, accelerator = machines.cluster.host, machines.cluster.host.accelerator
    device_memory = None
    if accelerator is not None:
        device_memory = min(accelerator.memory_bytes, most_device_memory or accelerator.memory_bytes)
    disk = host.disk if machines.cluster.store is None else None
    return Resources(
        device_memory=device_memory,
        host_memory=host.memory.size_bytes // machines.ranks,
        disk=_DISK if disk else None,
        disk_bytes=disk.size_bytes // machines.ranks if disk else None,
    )


def efficiency(first: Point, point: Point) -> float:
    """Return samples per second and device, divided by those of `first`, the smallest simulated run."""
    return (point.samples_per_s / first.samples_per_s) / (point.machines.devices / first.machines.devices)
