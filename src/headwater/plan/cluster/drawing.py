"""Pictures of simulated runs: speed by the number of CSXs, and one step on its resources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.packages import importing
from headwater.core.units import counted
from headwater.plan.cluster.report import shown_parts
from headwater.plan.cluster.scaling import Point, efficiency
from headwater.plan.cluster.timeline import Task, Timeline
from headwater.plan.cluster.types import Scaling

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {
    "compute": "#4878a8",
    "broadcast": "#5f9e94",
    "reduce": "#d79b3c",
    "update": "#b0567a",
    "disk": "#8f6bb3",
    "offload": "#9b8569",
    "idle": "#d9d9d9",
}
_MOST_RANKS_SHOWN = 4
"""Maximum number of ranks of a host that get a row. All ranks do the same, so a few of them show the step."""
_MOST_BARS = 3000
"""Maximum number of bars in a row: bars that are closer together are drawn as one."""


def draw_scaling(points: Sequence[Point], title: str, scaling: Scaling, path: Path) -> None:
    """Draw samples per second with the scaling efficiency, and the parts of a step, as a PNG at `path`.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    figure = _figure(11, 4.6)
    speed, parts = figure.subplots(1, 2)
    _draw_speed(points, speed)
    _draw_parts(points, parts)
    figure.suptitle(f"{title}, {scaling} scaling")
    figure.savefig(path, format="png", dpi=120)


def draw_timeline(point: Point, title: str, path: Path) -> None:
    """Draw the tasks of each resource of one host and of the store in a step, as a PNG at `path`.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    timeline = point.step.timeline
    rows = [(number, timeline.of(number)) for number in _rows(point)]
    rows = [(number, tasks) for number, tasks in rows if tasks]
    figure = _figure(12, 1.6 + 0.34 * len(rows))
    axes = figure.subplots()
    for height, (_, tasks) in enumerate(rows):
        for color, bars in _bars(timeline, tasks).items():
            in_ms = [(1e3 * start_s, 1e3 * length_s) for start_s, length_s in bars]
            axes.broken_barh(in_ms, (height - 0.38, 0.76), color=color, linewidth=0.4)
    names = [" ".join(timeline.resources[number]) for number, _ in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set(
        xlim=(0, 1e3 * point.step.step_s), ylim=(len(rows) - 0.4, -0.6), xlabel="ms from commit to commit"
    )
    axes.set_title(
        f"{title}: one step of {counted(point.num_csx, 'CSX', 'CSXs')} on {_hosts_text(point)}", loc="left"
    )
    kinds = {timeline.tasks[task].kind.value for _, tasks in rows for task in tasks}
    _legend(axes, [kind for kind in _COLORS if kind in kinds])
    figure.savefig(path, format="png", dpi=120)


def _hosts_text(point: Point) -> str:
    hosts = point.machines.hosts
    return "one host" if hosts == 1 else f"{hosts} hosts (one is shown)"


def _figure(width: float, height: float) -> Any:
    with importing("drawing a simulation", "plot", otherwise="leave --out out"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


def _draw_speed(points: Sequence[Point], axes: Axes) -> None:
    counts = [point.num_csx for point in points]
    speeds = [point.samples_per_s for point in points]
    first = points[0].machines.devices
    linear = [point.machines.devices * speeds[0] / first for point in points]
    axes.plot(counts, linear, color="#999999", linewidth=1, linestyle="--", label="linear")
    axes.plot(counts, speeds, color=_COLORS["compute"], marker="o", markersize=4, label="simulated")
    for point in points:
        at = (point.num_csx, point.samples_per_s)
        share = f"{efficiency(points[0], point):.0%}"
        axes.annotate(share, at, textcoords="offset points", xytext=(4, -12), fontsize="small")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2 if max(linear) < 64 * min(linear) else 10)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(counts, minor=False)
    axes.set(title="speed", xlabel="CSXs", ylabel="samples a second")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_parts(points: Sequence[Point], axes: Axes) -> None:
    names = shown_parts(points)
    bottoms = [0.0] * len(points)
    for name in names:
        shares = [point.parts[name] / point.step.step_s for point in points]
        axes.bar(range(len(points)), shares, bottom=bottoms, color=_COLORS[name], width=0.8)
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    axes.set_xticks(range(len(points)), [str(point.num_csx) for point in points])
    axes.set(title="time of a rank in a step", xlabel="CSXs", ylim=(0, 1), xlim=(-0.6, len(points) - 0.4))
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    _legend(axes, names)


def _legend(axes: Axes, names: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=_COLORS[name], label=name) for name in names]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")


def _rows(point: Point) -> Iterator[int]:
    """Yield the resources to draw. If there are many ranks, only the first ones and the last are drawn."""
    ranks = point.machines.ranks
    shown = {*range(min(ranks, _MOST_RANKS_SHOWN - 1)), ranks - 1}
    for number, (_, name) in enumerate(point.step.timeline.resources):
        words = name.split()
        if words[0] not in ("rank", "link") or int(words[1]) in shown:
            yield number


def _bars(timeline: Timeline, tasks: Sequence[int]) -> dict[str, list[tuple[float, float]]]:
    """Return beginning and length of the bars of a row, by color."""
    gap = timeline.end_s / _MOST_BARS
    bars: dict[str, list[tuple[float, float]]] = {}
    for color, group in groupby((timeline.tasks[task] for task in tasks), key=_color):
        for task in group:
            row = bars.setdefault(color, [])
            # A bar has a start and a length; their sum is its end.
            if row and 0 <= task.start_s - sum(row[-1]) < gap:
                row[-1] = (row[-1][0], task.end_s - row[-1][0])
            else:
                row.append((task.start_s, task.end_s - task.start_s))
    return bars


def _color(task: Task) -> str:
    return _COLORS[task.kind.value]
