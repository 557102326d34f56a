"""Facts of the newest process of a run, for programs that watch the run: its last step and its plan."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from headwater.core.files import replace_file
from headwater.trainer.callback import Callback, FitStart

_TOO_LARGE = 2**63


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """Facts of the newest process of a run.

    Attributes:
        start_step: steps done before the process.
        end_step: the last step of the run.
        started: time at which the training began, in seconds since 1970.
        device: `cpu` or `cuda`.
        memory_budget: largest number of bytes of host memory that the run may hold; `None`: no limit.
        memory_planned: peak of the resident host memory that the plan predicts, in bytes; `None` if unknown.
        step_s_planned: seconds of a step that the plan predicts; `None` if unknown.
    """

    start_step: int
    end_step: int
    started: float
    device: str
    memory_budget: int | None = None
    memory_planned: int | None = None
    step_s_planned: float | None = None


class FactsFile(Callback):
    """Writes the facts of the run to a file when training begins.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_fit_start(self, event: FitStart) -> None:
        plan, predicted = event.plan, event.plan.prediction
        facts = RunFacts(
            start_step=event.start_step,
            end_step=event.end_step,
            started=time.time(),
            device=plan.device,
            memory_budget=plan.host_limit,
            memory_planned=None if predicted is None else predicted.host_bytes,
            step_s_planned=None if predicted is None else predicted.step_s,
        )
        replace_file(self._path, json.dumps(dataclasses.asdict(facts)).encode())


def read_facts(path: Path) -> RunFacts | None:
    """Return the facts in a file; `None` if it is missing or damaged."""
    # A run of another version may have written other fields; damaged JSON may be nested without end.
    try:
        facts = RunFacts(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return facts if _is_valid(facts) else None


def _is_valid(facts: RunFacts) -> bool:
    """True if the values have the types of their fields. Another program may have written the file."""
    steps = facts.start_step, facts.end_step
    optional = facts.memory_budget, facts.memory_planned, facts.step_s_planned
    numbers = (*steps, facts.started, *(each for each in optional if each is not None))
    # The comparison is false for NaN.
    is_number = all(type(each) in (int, float) and abs(each) < _TOO_LARGE for each in numbers)
    return is_number and all(type(step) is int for step in steps) and isinstance(facts.device, str)
