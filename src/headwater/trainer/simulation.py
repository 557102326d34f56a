"""Simulated steps of many CSXs, from params and a cluster file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headwater.config.cluster import ClusterFile, DiskSection, MemorySection
from headwater.config.run import CommonInitConfig
from headwater.core.errors import ConfigError, DoesNotFitError
from headwater.core.patience import notice_if_long, print_notice
from headwater.core.units import counted
from headwater.plan.cluster.scaling import Point, simulate_point
from headwater.plan.cluster.types import (
    Accelerator,
    Cluster,
    Disk,
    Host,
    Memory,
    Network,
    Scaling,
    StoreHosts,
    place,
)
from headwater.plan.options import DividedTraces, TraceFor
from headwater.trainer.job import Trainable
from headwater.trainer.planning import divided_dry_runs, dry_runs, plan_request, training_workload

MOST_CSX = 1024
"""Largest number of CSXs that is simulated by default."""


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The result of a simulation: a step for each number of CSXs on a cluster.

    Attributes:
        cluster: the machines.
        scaling: what is constant, the batch size of a step or that of a CSX.
        points: a step for each number of CSXs.
        refused: why other numbers of CSXs have no step.
    """

    cluster: Cluster
    scaling: Scaling
    points: list[Point]
    refused: dict[int, str]


def cluster_of(file: ClusterFile, name: str) -> Cluster:
    """Return the cluster that a file describes."""
    host, accelerator = file.host, file.host.accelerator
    return Cluster(
        name=name,
        hosts=file.hosts,
        host=Host(
            ranks=host.ranks,
            memory=_memory(host.memory),
            flops_per_s=host.flops_per_s.model_dump(),
            saved_bytes_per_s=host.saved_bytes_per_s.model_dump(),
            accelerator=Accelerator(accelerator.memory, accelerator.link_bytes_per_s)
            if accelerator
            else None,
            disk=_disk(host.disk),
            attention_flops_per_s=host.attention_flops_per_s.model_dump()
            if host.attention_flops_per_s
            else {},
        ),
        network=Network(**file.network.model_dump()) if file.network else None,
        store=StoreHosts(file.store.hosts, _memory(file.store.memory), _disk(file.store.disk))
        if file.store
        else None,
    )


def _memory(section: MemorySection) -> Memory:
    return Memory(section.size, section.bytes_per_s, section.adamw_params_per_s)


def _disk(section: DiskSection | None) -> Disk | None:
    if section is None:
        return None
    return Disk(section.size, section.read_bytes_per_s, section.write_bytes_per_s)


def default_counts(cluster: Cluster) -> list[int]:
    """Return the powers of two up to the cluster's number of CSXs, and at most 1,024."""
    most = min(cluster.most_csx, MOST_CSX)
    return [1 << power for power in range(most.bit_length())]


def simulate(
    init: CommonInitConfig,
    trainable: Trainable,
    batch_size: int,
    cluster: Cluster,
    *,
    counts: Sequence[int] | None = None,
    scaling: Scaling = "strong",
) -> Simulation:
    """Simulate a step of each number of CSXs.

    Args:
        init: the params.
        trainable: the model with its loss.
        batch_size: samples of one step: of all CSXs together, or of each with weak scaling.
        cluster: the machines.
        counts: numbers of CSXs; `default_counts` if not given. Impossible numbers are left out, and
            printed on stderr before the simulation.
        scaling: `strong` or `weak`.

    Returns:
        The simulated steps.

    Raises:
        DoesNotFitError: if no number of CSXs has a plan.
    """
    # Shared by all numbers of CSXs.
    traces = _Traces(dry_runs(init, trainable), divided_dry_runs(init, trainable))
    asked = counts or default_counts(cluster)
    batch_sizes = {number: batch_size * (1 if scaling == "strong" else number) for number in asked}
    points: list[Point] = []
    refused = _impossible(cluster, batch_sizes)
    if counts is not None:
        for number, why in refused.items():
            print_notice(f"{number} CSXs are left out: {why}")
    with notice_if_long("planning") as activity:
        for number in (number for number in asked if number not in refused):
            ranks, position = counted(number, "CSX", "CSXs"), asked.index(number) + 1
            activity.name = f"simulating {ranks}, number {position} of {len(asked)}"
            try:
                points.append(_point(init, trainable, traces, cluster, number, batch_sizes[number]))
            # One number of CSXs without a plan must not end the comparison of the others.
            except (ConfigError, DoesNotFitError) as error:
                refused[number] = error.what
    if not points:
        number, why = next(iter(refused.items()))
        raise DoesNotFitError(
            f"no number of CSXs can train this: {number}: {why}",
            where=cluster.name,
            remedy="choose a larger cluster, or another batch_size",
        )
    return Simulation(cluster, scaling, points, refused)


def _impossible(cluster: Cluster, batch_sizes: Mapping[int, int]) -> dict[int, str]:
    """Return number of CSXs -> why that many CSXs cannot train a batch. Possible numbers are left out."""
    refused = {}
    for number, batch_size in batch_sizes.items():
        try:
            place(cluster, number)
        except ConfigError as error:
            refused[number] = error.what
            continue
        if batch_size % number:
            nearest = max(1, round(batch_size / number)) * number
            refused[number] = (
                f"a batch of {batch_size} cannot be divided among {number} CSXs (use --batch_size {nearest} "
                "or --scaling weak)"
            )
    return refused


class _Traces(NamedTuple):
    """The dry runs of a model, and those with smaller stages; see `PlanRequest`."""

    trace_for: TraceFor
    divided: DividedTraces


def _point(
    init: CommonInitConfig,
    trainable: Trainable,
    traces: _Traces,
    cluster: Cluster,
    number: int,
    batch_size: int,
) -> Point:
    machines = place(cluster, number)
    work = training_workload(init, trainable, batch_size // number)
    request = plan_request(init, trainable, work, machines.device)
    return simulate_point(dataclasses.replace(request, **traces._asdict()), machines)
