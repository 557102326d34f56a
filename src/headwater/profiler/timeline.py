"""A picture of one step: what the plan predicts above what was measured, in the same lanes."""

from __future__ import annotations

import io
from collections.abc import Sequence

from headwater.profiler.chrome import LANES, shown_events
from headwater.profiler.predicted import Bar, predicted_lanes
from headwater.profiler.profile import Profile

_COLORS = {
    "compute": "#4878a8",
    "wait": "#e2e2e2",
    "input": "#c9b7a0",
    "fetch": "#5f9e94",
    "gradient": "#d79b3c",
    "update": "#b0567a",
    "disk read": "#8f6bb3",
    "disk write": "#b9a3cf",
    "collective": "#9b8569",
}


def timeline_png(profile: Profile) -> bytes:
    """Return a PNG of the last profiled step. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    measured = measured_lanes(profile)
    predicted = {} if profile.plan is None else predicted_lanes(profile.plan)
    shown = [lane for lane in LANES if measured.get(lane) or predicted.get(lane)]
    blocks = [("predicted", predicted), ("measured", measured)] if predicted else [("measured", measured)]
    figure = Figure(figsize=(12, 1.4 + 0.36 * len(blocks) * len(shown)), layout="constrained")
    axes = figure.subplots()
    labels, height, used = [], 0, set()
    for title, lanes in blocks:
        for lane in shown:
            for begin, end, kind in lanes.get(lane, ()):
                axes.broken_barh(
                    [(1e3 * begin, 1e3 * (end - begin))], (height - 0.38, 0.76), color=_COLORS[kind]
                )
                used.add(kind)
            labels.append(f"{title}: {lane}")
            height += 1
    axes.set_yticks(range(height), labels)
    axes.set(ylim=(height - 0.4, -0.6), xlabel="ms from the beginning of the step")
    axes.set_xlim(left=0)
    axes.set_title(f"step {profile.summary.steps[-1]}{_ratios_text(profile)}", loc="left", fontsize="medium")
    patches = [Patch(color=color, label=kind) for kind, color in _COLORS.items() if kind in used]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()


def measured_lanes(profile: Profile) -> dict[str, list[Bar]]:
    """Return the bars of each lane in the last profiled step."""
    first, last = profile.spans[-1]
    lanes: dict[str, list[Bar]] = {}
    for lane, _, event in shown_events(profile):
        begin, end = max(event.begin, first), min(event.end, last)
        if begin < end:
            bar = (1e-9 * (begin - first), 1e-9 * (end - first), event.kind)
            lanes.setdefault(lane, []).append(bar)
    return {lane: _joined(bars, 1e-9 * (last - first) / 2000) for lane, bars in lanes.items()}


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
    return f"; measured / predicted: {', '.join(shown)}"
