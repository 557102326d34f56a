"""A profile of some steps: the time of modules and of other work, as a table and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from headwater.core.busy import BusyTimes
from headwater.core.recorder import COLLECTIVE, GRADIENT, INPUT, UPDATE, WAIT, Event
from headwater.plan.types import Plan

MOST_ROWS = 10
_KINDS = {
    UPDATE: "update of weights",
    WAIT: "wait for weights",
    GRADIENT: "gradients to the store",
    INPUT: "wait for data",
    COLLECTIVE: "other ranks",
}
_MEASURED = {
    "compute": ("compute",),
    "update": ("update",),
    "copy": ("fetch",),
    "disk": ("disk read", "disk write"),
    "link": ("fetch",),
}
"""Kinds of recorded work, by kind in the prediction of a plan."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a profile: the time of one module's forward or backward, or of other work.

    Attributes:
        name: `model.layers.0.self_attn.fwd`, or the name of other work.
        seconds: time of all profiled steps, without that of inner modules that have rows.
        calls: number of calls; 0 for other work.
        flops: floating-point operations, if the dry run knows them for exactly this row.
    """

    name: str
    seconds: float
    calls: int = 0
    flops: int = 0


@dataclasses.dataclass(frozen=True)
class Profile:
    """The time of the computing thread in some steps, and what other threads did meanwhile.

    Attributes:
        steps: numbers of the steps.
        spans: begin and end of each step, in ns.
        modules: the modules, the most expensive first.
        others: other work of the computing thread.
        busy: the seconds of each kind of work on all threads.
        events: recorded work.
        pieces: computation: row, begin, end and stage.
        names: name of each row of `pieces`.
        thread: name of the computing thread.
        plan: the plan of the steps.
        operators: a table of operators by module, if it was asked for.
    """

    steps: Sequence[int]
    spans: Sequence[tuple[int, int]]
    modules: Sequence[Row]
    others: Sequence[Row]
    busy: BusyTimes
    events: Sequence[Event]
    pieces: Sequence[tuple[int, int, int, str]]
    names: Mapping[int, str]
    thread: str
    plan: Plan | None = None
    operators: str | None = None

    @property
    def whole_s(self) -> float:
        """Seconds of all steps together."""
        return 1e-9 * sum(end - begin for begin, end in self.spans)

    def ratios(self) -> dict[str, tuple[float, float]]:
        """Return (predicted, measured) seconds of a step by kind, for each kind that the plan predicts."""
        prediction = None if self.plan is None else self.plan.prediction
        if prediction is None or prediction.step_s is None or self.plan is None:
            return {}
        found = {}
        for kind, seconds in prediction.step_parts.items():
            if kind in _MEASURED and seconds > 0:
                busy = (self.busy.busy_s.get(name, 0.0) for name in _MEASURED[kind])
                found[kind] = (seconds, sum(busy) / len(self.steps))
        return found | {"step": (prediction.step_s, self.whole_s / len(self.steps))}


def kind_name(kind: str) -> str:
    """Return the name of the row for a kind of work other than computation."""
    return _KINDS.get(kind, kind)


def table_of(profile: Profile, most_rows: int = MOST_ROWS) -> Table:
    """Return a table of the most expensive modules and of all other work. The shares add up to 100 %."""
    first, last = profile.steps[0], profile.steps[-1]
    title = f"Time of step {first}" if first == last else f"Time of steps {first} to {last}, mean of a step"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("PyTorch module")
    for name in ("time, ms", "% of step", "calls", "GFLOP/s"):
        table.add_column(name, justify="right")
    for number, row in enumerate(profile.modules[:most_rows]):
        table.add_row(str(number), *_cells(profile, row))
    hidden = profile.modules[most_rows:]
    if hidden:
        others = Row(f"{len(hidden)} other rows of modules", sum(row.seconds for row in hidden))
        table.add_row("", *_cells(profile, others))
    for row in profile.others:
        table.add_row("", *_cells(profile, row))
    whole = Row("step", profile.whole_s)
    table.add_row("", *_cells(profile, whole), style="bold")
    return table


def _cells(profile: Profile, row: Row) -> tuple[str, ...]:
    count = len(profile.steps)
    rate = f"{1e-9 * row.flops / row.seconds:.1f}" if row.flops and row.seconds else ""
    calls = f"{row.calls / count:g}" if row.calls else ""
    milliseconds = 1e3 * row.seconds / count
    return row.name, f"{milliseconds:.3f}", f"{100 * row.seconds / profile.whole_s:.2f}", calls, rate


def document_of(profile: Profile) -> dict[str, Any]:
    """Return the profile as data for JSON: seconds, shares and bytes of a step."""
    count, whole_s = len(profile.steps), profile.whole_s

    def entry(row: Row) -> dict[str, Any]:
        found: dict[str, Any] = {
            "name": row.name,
            "ms": 1e3 * row.seconds / count,
            "share": row.seconds / whole_s,
        }
        if row.calls:
            found["calls"] = row.calls / count
        if row.flops:
            found["flops_per_s"] = row.flops / row.seconds
        return found

    return {
        "steps": list(profile.steps),
        "step_ms": 1e3 * whole_s / count,
        "modules": [entry(row) for row in profile.modules],
        "others": [entry(row) for row in profile.others],
        "all_threads": {
            kind: {
                "ms": 1e3 * seconds / count,
                "bytes": profile.busy.moved_bytes.get(kind, 0) / count,
            }
            for kind, seconds in profile.busy.busy_s.items()
        },
        "bound_ms": {bound: 1e3 * value / count for bound, value in profile.busy.bound_s.items()},
        "prediction": {
            kind: {
                "predicted_ms": 1e3 * predicted,
                "measured_ms": 1e3 * measured,
                "ratio": measured / predicted,
            }
            for kind, (predicted, measured) in profile.ratios().items()
        },
    }
