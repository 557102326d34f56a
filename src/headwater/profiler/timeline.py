"""A picture of one step: predicted work above measured work, on one time axis."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from headwater.core.recorder import COMPUTE
from headwater.profiler.chrome import LANES, shown_events
from headwater.profiler.predicted import BACKWARD, FORWARD, Bar, predicted_lanes
from headwater.profiler.profile import Profile
from headwater.profiler.summary import kind_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OTHER = "other compute"
_COLORS = {
    FORWARD: "#2b6cb0",
    BACKWARD: "#8fbbe3",
    _OTHER: "#9aa5b1",
    "wait": "#f0c9b4",
    "input": "#b7541a",
    "fetch": "#2f8f83",
    "gradient": "#d79b3c",
    "update": "#a83e6c",
    "disk read": "#6b46a3",
    "disk write": "#b79fdc",
    "collective": "#6b5744",
}
_EDGE = 0.7
"""Width of the edge of a bar in points: without it, work of less than a pixel would be invisible."""


def timeline_png(profile: Profile) -> bytes:
    """Return a PNG of the last profiled step. Needs matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    measured = measured_lanes(profile)
    predicted = {} if profile.plan is None else predicted_lanes(profile.plan)
    panels = {"Predicted by the plan": predicted, "Measured": measured}
    shown = {title: lanes for title, lanes in panels.items() if any(lanes.values())}
    heights = [max(sum(map(bool, lanes.values())), 1) for lanes in shown.values()] or [1]
    with rc_context({"font.size": 12}):
        figure = Figure(figsize=(11, 1.9 + 0.55 * len(heights) + 0.36 * sum(heights)), layout="constrained")
        panel_axes = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, (title, lanes) in zip(panel_axes, shown.items(), strict=False):
            _draw_lanes(axes, lanes)
            end_s = max(end for bars in lanes.values() for _, end, _ in bars)
            axes.set_title(f"{title}: {1e3 * end_s:.4g} ms", loc="left", fontsize="medium")
        panel_axes[-1].set_xlabel("ms from the beginning of the step")
        panel_axes[-1].set_xlim(left=0)
        figure.suptitle(f"Step {profile.summary.steps[-1]}{_ratios_text(profile)}", x=0.01, ha="left")
        used = {kind for lanes in shown.values() for bars in lanes.values() for *_, kind in bars}
        kinds = [kind for kind in _COLORS if kind in used]
        patches = [Patch(color=_COLORS[kind], label=kind_name(kind)) for kind in kinds]
        figure.legend(handles=patches, loc="outside lower center", ncols=5, frameon=False, fontsize="small")
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def _draw_lanes(axes: Axes, lanes: Mapping[str, Sequence[Bar]]) -> None:
    """Draw the lanes that have bars, one below the other."""
    names = [lane for lane in LANES if lanes.get(lane)]
    for height, name in enumerate(names):
        for begin, end, kind in lanes[name]:
            bar = (1e3 * begin, 1e3 * (end - begin))
            axes.broken_barh([bar], (height - 0.4, 0.8), color=_COLORS[kind], linewidth=_EDGE)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def measured_lanes(profile: Profile) -> dict[str, list[Bar]]:
    """Return the bars of each lane in the last profiled step."""
    first, last = profile.spans[-1]
    lanes: dict[str, list[Bar]] = {}
    for lane, name, event in shown_events(profile):
        begin, end = max(event.begin, first), min(event.end, last)
        if begin < end:
            kind = _compute_kind(name) if event.kind == COMPUTE else event.kind
            bar = (1e-9 * (begin - first), 1e-9 * (end - first), kind)
            lanes.setdefault(lane, []).append(bar)
    return {lane: _joined(bars, 1e-9 * (last - first) / 2000) for lane, bars in lanes.items()}


def _compute_kind(name: str) -> str:
    """Return the kind of a piece of computation with the name of a row of the profile."""
    return {"fwd": FORWARD, "bwd": BACKWARD}.get(name.rpartition(".")[2], _OTHER)


def _joined(bars: Sequence[Bar], gap: float) -> list[Bar]:
    """Join bars of one kind that are so close that no picture shows the gap."""
    joined: list[Bar] = []
    for begin, end, kind in sorted(bars, key=lambda bar: (bar[2], bar[0])):
        if joined and joined[-1][2] == kind and begin - joined[-1][1] < gap:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]), kind)
        else:
            joined.append((begin, end, kind))
    return joined


def _ratios_text(profile: Profile) -> str:
    ratios = profile.summary.ratios
    if not ratios:
        return ""
    shown = (f"{kind} {measured / predicted:.2f}" for kind, (predicted, measured) in ratios.items())
    return f". Measured / predicted time: {', '.join(shown)}"
