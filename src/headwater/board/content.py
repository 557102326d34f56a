"""The documents that the page gets, as values that JSON can represent. Nothing here reads a file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headwater.appliance.types import Job, Phase
from headwater.board.digest import SERIES, Bands
from headwater.core.units import counted, format_bytes, format_duration
from headwater.trainer.facts import RunFacts
from headwater.trainer.history import StepNumbers

_DIGITS = 6
_QUIET_S, _QUIET_STEPS = 60.0, 5.0
"""A run is quiet after this many seconds, and after this many times the duration of a step."""

Document = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RunState:
    """The state of one run, as its files show it.

    Attributes:
        name: relative path of its folder.
        steps: its newest steps.
        facts: facts of its newest process; `None` if the run has no such file.
        changed: time of the last change of the history, in seconds since 1970.
        read_share: the part of the history that was read.
        damaged: lines of the history that could not be read.
        problem: why the history cannot be read; `None` if it can.
        version: number that grows with each change.
    """

    name: str
    steps: Sequence[StepNumbers]
    facts: RunFacts | None
    changed: float
    read_share: float
    damaged: int
    problem: str | None
    version: int


def run_row(run: RunState, now: float) -> Document:
    """Return the row of a run in the list of runs.

    Args:
        run: the run.
        now: current time, in seconds since 1970.
    """
    last, facts = (run.steps[-1] if run.steps else None), run.facts
    step_s = sum(step.step_s for step in run.steps) / len(run.steps) if run.steps else 0.0
    counts = sum(step.tokens or step.samples for step in run.steps)
    left = max(0, facts.end_step - last.step) if facts and last else None
    state = _state(left, now - run.changed, step_s)
    return {
        "name": run.name,
        "version": run.version,
        "state": state,
        "step": last and last.step,
        "end_step": facts and facts.end_step,
        "loss": _number(last and last.loss),
        "rate": _number(counts / (step_s * len(run.steps)) if step_s > 0 else None),
        "unit": last and last.unit,
        "memory": (last and last.memory_bytes) or None,
        "memory_planned": facts and facts.memory_planned,
        "memory_budget": facts and facts.memory_budget,
        "memory_text": _memory_text(last, facts),
        "eta": format_duration(left * step_s) if state == "running" and left is not None else None,
        "changed": run.changed,
        "read_share": run.read_share,
        "notices": list(_notices(run)),
    }


def _state(left: int | None, age_s: float, step_s: float) -> str:
    if left == 0:
        return "complete"
    return "running" if age_s < max(_QUIET_S, _QUIET_STEPS * step_s) else "quiet"


def _memory_text(last: StepNumbers | None, facts: RunFacts | None) -> str | None:
    """Return the memory of a run beside its plan and its budget."""
    if last is None or not last.memory_bytes:
        return None
    parts = [format_bytes(last.memory_bytes)]
    if facts is not None and facts.memory_planned:
        parts.append(f"plan {format_bytes(facts.memory_planned)}")
    if facts is not None and facts.memory_budget:
        parts.append(f"budget {format_bytes(facts.memory_budget)}")
    return ", ".join(parts)


def _notices(run: RunState) -> Iterable[str]:
    if run.problem is not None:
        yield run.problem
    if run.damaged:
        yield f"{counted(run.damaged, 'damaged line', 'damaged lines')} of history.jsonl left out"


def curves(bands: Bands, validations: Iterable[Mapping[str, Any]]) -> Document:
    """Return the curves of a run: steps, and the least and the greatest values of each series.

    A series without any value is left out.
    """
    document: Document = {"steps": bands.steps.tolist(), "series": {}}
    for name, low, high in zip(SERIES, bands.low.tolist(), bands.high.tolist(), strict=True):
        if any(math.isfinite(value) for value in low):
            document["series"][name] = [list(map(_number, low)), list(map(_number, high))]
    found = ((record["step"], _number(record["loss"])) for record in validations)
    document["validation"] = [[step, loss] for step, loss in found if loss is not None]
    return document


def validation_rows(validations: Iterable[Mapping[str, Any]]) -> list[Document]:
    """Return the rows of the table of evaluations; the newest first."""
    rows = []
    for record in validations:
        metrics = record.get("metrics")
        metrics = metrics if isinstance(metrics, dict) else {}
        rows.append(
            {
                "step": record["step"],
                "loader": record.get("loader", 0),
                "loss": _number(record["loss"]),
                "metrics": {str(name): _number(value) for name, value in metrics.items()},
            }
        )
    return rows[::-1]


def job_rows(jobs: Iterable[Job], user: str, *, is_root: bool) -> list[Document]:
    """Return the rows of the list of jobs, the newest first, with the actions that the user may take.

    Args:
        jobs: the jobs.
        user: name of the user of the board.
        is_root: true if this user is root, who may change the jobs of all users.
    """
    return [
        {
            "name": job.name,
            "user": job.user,
            "phase": job.phase.value,
            "priority": job.priority.value,
            "num_csx": job.num_csx,
            "command": " ".join(job.command),
            "model_dir": job.model_dir and str(job.model_dir),
            "reason": job.reason,
            "created": job.created,
            "can_cancel": not job.phase.over and (is_root or job.user == user),
            "can_prioritize": job.phase in (Phase.CREATED, Phase.QUEUED) and (is_root or job.user == user),
        }
        for job in sorted(jobs, key=lambda job: job.created, reverse=True)
    ]


def _number(value: Any) -> float | None:
    """Return a number with six digits, which suffice for a picture; `None` if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")
