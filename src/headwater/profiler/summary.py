"""The times of one rank in the profiled steps: plain data, which ranks send to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from headwater.core.busy import BusyTimes
from headwater.core.recorder import COLLECTIVE, GRADIENT, INPUT, UPDATE, WAIT

_OTHER_RANKS = "other ranks"
_KINDS: Mapping[str, str] = {
    UPDATE: "update of weights",
    WAIT: "wait for weights",
    GRADIENT: "gradients to the store",
    INPUT: "wait for data",
    COLLECTIVE: _OTHER_RANKS,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a profile: the time of one module's forward or backward, or of other work.

    Attributes:
        name: `model.layers.0.self_attn.fwd`, or the name of other work.
        seconds: time of all profiled steps, without that of inner modules that have rows.
        calls: number of calls; 0 for other work.
        flops: floating-point operations, if the dry run knows them for exactly this row.
        wait_s: seconds in which the computing thread waited for weights during these calls. They are not part
            of `seconds`, but of the row of all waits.
    """

    name: str
    seconds: float
    calls: int = 0
    flops: int = 0
    wait_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class StageWork:
    """The work of one stage in the profiled steps, on all threads of a rank.

    Attributes:
        name: name of the stage.
        forward_s: computation of forwards on the computing thread.
        backward_s: computation of backwards, with forwards that ran again.
        wait_s: waits of the computing thread for the weights of this stage.
        update_s: seconds in which threads updated this stage.
        flops: floating-point operations of forward and backward; 0 if unknown.
        weight_bytes: bytes of weights copied to slabs.
        gradient_bytes: bytes of gradients added to the store.
        disk_bytes: bytes read from the disk and written to it.
    """

    name: str
    forward_s: float = 0.0
    backward_s: float = 0.0
    wait_s: float = 0.0
    update_s: float = 0.0
    flops: int = 0
    weight_bytes: int = 0
    gradient_bytes: int = 0
    disk_bytes: int = 0

    @property
    def compute_s(self) -> float:
        """Seconds of computation."""
        return self.forward_s + self.backward_s


@dataclasses.dataclass(frozen=True)
class Summary:
    """The times of one rank in the profiled steps.

    Attributes:
        rank: number of the rank.
        steps: numbers of the steps.
        whole_s: seconds of all steps together.
        modules: the modules, the most expensive first.
        others: other work of the computing thread.
        stages: the stages in the order of the model.
        busy: the seconds of each kind of work on all threads.
        ratios: (predicted, measured) seconds of a step by kind, for each kind that the plan predicts.
    """

    rank: int
    steps: tuple[int, ...]
    whole_s: float
    modules: tuple[Row, ...]
    others: tuple[Row, ...]
    stages: tuple[StageWork, ...]
    busy: BusyTimes
    ratios: Mapping[str, tuple[float, float]]

    @property
    def own_s(self) -> float:
        """Seconds of all steps in which the computing thread did not wait for other ranks."""
        return self.whole_s - sum(row.seconds for row in self.others if row.name == _OTHER_RANKS)


def kind_name(kind: str) -> str:
    """Return the name of the row for a kind of work other than computation."""
    return _KINDS.get(kind, kind)


def slowest(summaries: Sequence[Summary]) -> Summary:
    """Return the summary of the rank for which the others wait: it spends most time on its own work."""
    return max(summaries, key=lambda summary: (any(row.calls for row in summary.modules), summary.own_s))


def of_all_ranks(summaries: Sequence[Summary]) -> Summary:
    """Return the summary of the slowest rank, with the updates and the disk of all ranks.

    One rank of a host updates all of a stage on disk. So a stage's updates and its bytes of the disk are sums
    over the ranks. Ranks work at the same time. So the measured time of a kind of work is that of the rank
    which spends most on this kind.
    """
    shown = slowest(summaries)
    names = dict.fromkeys(stage.name for summary in (shown, *summaries) for stage in summary.stages)
    work = [{stage.name: stage for stage in summary.stages} for summary in summaries]
    own = {stage.name: stage for stage in shown.stages}
    stages = tuple(
        dataclasses.replace(
            own.get(name, StageWork(name)),
            update_s=sum(each[name].update_s for each in work if name in each),
            disk_bytes=sum(each[name].disk_bytes for each in work if name in each),
        )
        for name in names
    )
    ratios = {
        kind: (predicted, max(each.ratios[kind][1] for each in summaries if kind in each.ratios))
        for kind, (predicted, _) in shown.ratios.items()
    }
    return dataclasses.replace(shown, stages=stages, ratios=ratios)


def document_of(summary: Summary) -> dict[str, Any]:
    """Return a summary as data for JSON: milliseconds, shares and bytes of a step."""
    count, whole_s = len(summary.steps), summary.whole_s

    def row_entry(row: Row) -> dict[str, Any]:
        found: dict[str, Any] = {
            "name": row.name,
            "ms": 1e3 * row.seconds / count,
            "share": row.seconds / whole_s,
        }
        if row.calls:
            found["calls"] = row.calls / count
            found["wait_ms"] = 1e3 * row.wait_s / count
        if row.flops:
            found["flops_per_s"] = row.flops / row.seconds
        return found

    def stage_entry(stage: StageWork) -> dict[str, Any]:
        found: dict[str, Any] = {"name": stage.name}
        for name in ("forward", "backward", "wait", "update"):
            found[f"{name}_ms"] = 1e3 * getattr(stage, f"{name}_s") / count
        for name in ("weight", "gradient", "disk"):
            found[f"{name}_bytes"] = getattr(stage, f"{name}_bytes") / count
        if stage.flops and stage.compute_s:
            found["flops_per_s"] = stage.flops / stage.compute_s
        return found

    return {
        "rank": summary.rank,
        "steps": list(summary.steps),
        "step_ms": 1e3 * whole_s / count,
        "modules": [row_entry(row) for row in summary.modules],
        "others": [row_entry(row) for row in summary.others],
        "stages": [stage_entry(stage) for stage in summary.stages],
        "all_threads": {
            kind: {
                "ms": 1e3 * seconds / count,
                "bytes": summary.busy.moved_bytes.get(kind, 0) / count,
            }
            for kind, seconds in summary.busy.busy_s.items()
        },
        "bound_ms": {bound: 1e3 * value / count for bound, value in summary.busy.bound_s.items()},
        "prediction": {
            kind: {
                "predicted_ms": 1e3 * predicted,
                "measured_ms": 1e3 * measured,
                "ratio": measured / predicted,
            }
            for kind, (predicted, measured) in summary.ratios.items()
        },
    }
