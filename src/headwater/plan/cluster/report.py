"""Reports of simulated steps: a table, JSON, and a trace for trace viewers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from headwater.plan.cluster.parts import PARTS
from headwater.plan.cluster.scaling import Point, efficiency
from headwater.plan.cluster.timeline import Timeline
from headwater.plan.cluster.types import Cluster, Scaling

_SMALLEST_SHARE = 5e-4
"""Parts with less than this share of every step are not shown."""


def shown_parts(points: Sequence[Point]) -> list[str]:
    """Return the kinds of work that tables show: those with more than a tiny share of some step."""
    return [
        name
        for name in PARTS
        if any(point.parts[name] > _SMALLEST_SHARE * point.step.step_s for point in points)
    ]


def render_scaling(points: Sequence[Point], cluster: Cluster, scaling: Scaling) -> RenderableType:
    """Return tables of the speed of each number of CSXs, and of the time of their ranks."""
    batch = f"a batch of {points[0].batch_size}" if scaling == "strong" else "the same batch for each"
    title = f"{cluster.name}, {scaling} scaling: {batch}"
    spent = "time of a rank in a step, seconds"
    return Group(
        f"[bold]{title}[/bold]", _speed_table(points), "", f"[bold]{spent}[/bold]", _parts_table(points)
    )


def _speed_table(points: Sequence[Point]) -> Table:
    table = _table("CSXs", "hosts", "batch", "micro-batches", "step, s", "samples/s", "efficiency")
    for point in points:
        plan = point.plan
        table.add_row(
            str(point.num_csx),
            str(point.machines.hosts),
            str(point.batch_size),
            f"{plan.num_micro_batches} × {plan.micro_batch_size}",
            f"{point.step.step_s:.3g}",
            f"{point.samples_per_s:.3g}",
            f"{efficiency(points[0], point):.1%}",
        )
    return table


def _parts_table(points: Sequence[Point]) -> Table:
    names = shown_parts(points)
    table = _table("CSXs", *names)
    for point in points:
        shown = (point.parts[name] for name in names)
        table.add_row(str(point.num_csx), *(f"{seconds:.3g}" if seconds else "" for seconds in shown))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def scaling_document(
    points: Sequence[Point], refused: Mapping[int, str], cluster: Cluster, scaling: Scaling
) -> dict[str, Any]:
    """Return the content of the tables, and more, as data for JSON, in bytes, seconds and samples.

    Args:
        points: the steps.
        refused: why other numbers of CSXs have no step.
        cluster: the machines.
        scaling: what is constant, the batch size of a step or that of a CSX.
    """
    return {
        "cluster": cluster.name,
        "scaling": scaling,
        "points": [_point_document(point, points[0]) for point in points],
        "refused": [{"num_csx": number, "why": why} for number, why in refused.items()],
    }


def _point_document(point: Point, first: Point) -> dict[str, Any]:
    plan, timeline = point.plan, point.step.timeline
    return {
        "num_csx": point.num_csx,
        "hosts": point.machines.hosts,
        "batch_size": point.batch_size,
        "step_s": point.step.step_s,
        "samples_per_s": point.samples_per_s,
        "efficiency": efficiency(first, point),
        "parts_s": point.parts,
        "plan": {
            "tier": plan.tier,
            "stages_in_memory": len(plan.in_memory) if plan.tier == "disk" else len(plan.trace.stages),
            "gradient_tier": plan.gradient_tier,
            "slabs": None if plan.in_place else plan.slabs,
            "micro_batch_size": plan.micro_batch_size,
            "num_micro_batches": plan.num_micro_batches,
            "activations": dict(Counter(policy.value for policy in plan.activations)),
        },
        "link_bytes": {
            f"{place} {name}": timeline.bytes_over(number)
            for number, (place, name) in enumerate(timeline.resources)
            if timeline.bytes_over(number)
        },
    }


def chrome_trace(point: Point) -> dict[str, Any]:
    """Return a step in the Trace Event Format of chrome://tracing and Perfetto (times in microseconds)."""
    stages = [stage.name or "(model)" for stage in point.plan.trace.stages]
    return {
        "traceEvents": [*_names(point.step.timeline), *_events(point.step.timeline, stages)],
        "displayTimeUnit": "ms",
    }


def _processes(timeline: Timeline) -> dict[str, int]:
    places = dict.fromkeys(place for place, _ in timeline.resources)
    return {place: number for number, place in enumerate(places, start=1)}


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    processes = _processes(timeline)
    for place, process in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": place}}
    for number, (place, name) in enumerate(timeline.resources, start=1):
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": processes[place],
            "tid": number,
            "args": {"name": name},
        }


def _events(timeline: Timeline, stages: Sequence[str]) -> Iterator[dict[str, Any]]:
    processes = _processes(timeline)
    for task in timeline.tasks:
        arguments: dict[str, Any] = {"bytes": task.num_bytes} if task.num_bytes else {}
        if task.stage >= 0:
            arguments["stage"] = stages[task.stage]
        # A task is an event of each of its resources, because a viewer draws a row for each resource.
        for resource in task.resources:
            yield {
                "ph": "X",
                "name": task.name,
                "cat": task.kind.value,
                "ts": task.start_s * 1e6,
                "dur": (task.end_s - task.start_s) * 1e6,
                "pid": processes[timeline.resources[resource][0]],
                "tid": resource + 1,
                "args": arguments,
            }
