"""A profile of some steps: the times of modules and stages, and the recorded work behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from headwater.core.recorder import Event
from headwater.plan.types import Plan
from headwater.profiler.attribution import Piece
from headwater.profiler.summary import Summary


@dataclasses.dataclass(frozen=True)
class Profile:
    """The time of the computing thread in some steps, and what other threads did meanwhile.

    Attributes:
        summary: the times of modules, stages and other work.
        spans: begin and end of each step, in ns.
        events: recorded work.
        pieces: computation: row, begin, end and stage.
        names: name of each row of `pieces`.
        thread: name of the computing thread.
        plan: the plan of the steps.
        operators: a table of operators by module, if it was asked for.
    """

    summary: Summary
    spans: Sequence[tuple[int, int]]
    events: Sequence[Event]
    pieces: Sequence[Piece]
    names: Mapping[int, str]
    thread: str
    plan: Plan | None = None
    operators: str | None = None
