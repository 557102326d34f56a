"""Takes a profile: wraps the calls of modules for some steps, then sums the recorded times."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import final

from torch import nn

from headwater.core.busy import BusyTimes, busy_times, fetch_bound
from headwater.core.cleanup import on_failure
from headwater.core.errors import ConfigError, RunError
from headwater.core.precision import Precision
from headwater.core.recorder import RECORDER, Event
from headwater.plan.partition import find_stages
from headwater.plan.types import Plan
from headwater.profiler.attribution import REST, Attribution, attribute, pieces
from headwater.profiler.modules import LOSS, ModuleWatch, profiled_modules
from headwater.profiler.operators import OperatorWatch
from headwater.profiler.profile import Profile
from headwater.profiler.stages import stage_flops, stage_work
from headwater.profiler.summary import Row, Summary, kind_name

_TAKING = threading.Lock()
"""Held while a profile is taken: two at once would count each other's work."""

_MEASURED = {
    "compute": ("compute",),
    "update": ("update",),
    "copy": ("fetch",),
    "disk": ("disk read", "disk write"),
    "link": ("fetch",),
}
"""Kinds of recorded work, by kind in the prediction of a plan."""


@final
class ProfiledSteps:
    """A profile that is being taken on the calling thread. Calls of modules are wrapped until `finish`.

    Args:
        model: the model; `None` to time no modules.
        plan: the plan of the steps, if there is one.
        depth: levels of modules with rows below the module of a stage.
        operators: record the operators inside the modules too. This slows the steps down.
        rank: number of this rank.

    Raises:
        ConfigError: if `depth` is not an integer from 0.
        RunError: if this process takes another profile at the same time.
    """

    def __init__(
        self,
        model: nn.Module | None,
        plan: Plan | None,
        *,
        depth: int = 1,
        operators: bool = False,
        rank: int = 0,
    ) -> None:
        if not isinstance(depth, int) or depth < 0:
            raise ConfigError(
                f"expected depth to be a number >= 0, got {depth!r}",
                where="a profile",
                remedy="write the number of levels of modules with separate rows below a block, such as 1",
            )
        if not _TAKING.acquire(blocking=False):
            raise RunError(
                "expected one profile at a time, but this process is taking another one already",
                where="a profile",
                remedy="end the first profile before the second begins",
            )
        self._taking = ExitStack()
        self._taking.callback(_TAKING.release)
        self._plan = plan
        self._rank = rank
        with on_failure(self.close):
            self._operators = OperatorWatch() if operators else None
            if self._operators is not None:
                self._taking.callback(self._operators.stop)
            self._modules = {} if model is None else profiled_modules(model, _stage_names(model, plan), depth)
            self._watch = ModuleWatch(self._modules)
            self._taking.callback(self._watch.close)
        self._steps: list[int] = []
        self._spans: list[tuple[int, int]] = []
        self._events: list[Event] = []

    def add_step(self, number: int, begin: int, end: int) -> None:
        """Add a step that has just ended."""
        self._watch.end_step()
        self._steps.append(number)
        self._spans.append((begin, end))
        # Now: the ring of the recorder may not hold all steps.
        self._events += RECORDER.events(begin, end)

    def set_plan(self, plan: Plan) -> None:
        """Set the plan of the profiled steps; used if the plan was made after the profile had begun."""
        self._plan = plan

    @property
    def has_steps(self) -> bool:
        """True if a step was added."""
        return bool(self._steps)

    def close(self) -> None:
        """Remove the wrappers around the calls of modules, and allow another profile."""
        self._taking.close()

    def finish(self) -> Profile:
        """Remove the wrappers, and return the profile of the steps."""
        self.close()
        thread = RECORDER.lane().thread
        # Work that continues in the next step was read twice.
        self._events = list(dict.fromkeys(self._events))
        own = [event for event in self._events if event.thread == thread]
        stamps, names = self._watch.stamps, dict(enumerate(self._watch.names))
        names |= {LOSS: "loss", REST: "step"}
        sums = attribute(stamps, own, self._spans)
        computed = [piece for begin, end in self._spans for piece in pieces(stamps, own, begin, end)]
        busy = self._busy(thread)
        summary = Summary(
            rank=self._rank,
            steps=tuple(self._steps),
            whole_s=1e-9 * sums.whole,
            modules=self._module_rows(sums, names),
            others=_other_rows(sums),
            stages=stage_work(computed, self._events, thread, self._spans, self._stage_flops()),
            busy=busy,
            ratios=self._ratios(busy, 1e-9 * sums.whole),
        )
        return Profile(
            summary=summary,
            spans=self._spans,
            events=self._events,
            pieces=computed,
            names=names,
            thread=thread,
            plan=self._plan,
            operators=None if self._operators is None else self._operators.table(stamps, names),
        )

    def _module_rows(self, sums: Attribution, names: Mapping[int, str]) -> tuple[Row, ...]:
        """Return the rows of the modules, the most expensive first."""
        flops = self._row_flops()
        return tuple(
            Row(
                names[row],
                1e-9 * sums.rows[row],
                self._watch.calls[row - row % 2],
                flops.get(names[row], 0),
                1e-9 * sums.waits.get(row, 0),
            )
            for row in sorted(sums.rows, key=lambda row: -sums.rows[row])
            if row >= 0
        )

    def _busy(self, thread: str) -> BusyTimes:
        bound = fetch_bound("cpu" if self._plan is None else self._plan.device)
        each = [busy_times(self._events, begin, end, thread, bound) for begin, end in self._spans]
        moved = busy_times(self._events, *self._range, thread).moved_bytes
        return BusyTimes(
            _summed([times.busy_s for times in each]), _summed([times.bound_s for times in each]), moved
        )

    @property
    def _range(self) -> tuple[int, int]:
        return self._spans[0][0], self._spans[-1][1]

    def _stage_flops(self) -> dict[str, tuple[int, int]]:
        """Return the FLOPs of (forward, backward) of all profiled steps, by stage."""
        return {} if self._plan is None else stage_flops(self._plan, len(self._steps))

    def _row_flops(self) -> dict[str, int]:
        """Return the FLOPs of all profiled steps by row, for stages whose modules have no rows inside."""
        found = dict[str, int]()
        for stage, (forward, backward) in self._stage_flops().items():
            inside = any(path.startswith(f"{stage}.") for path in self._modules)
            if stage in self._modules and stage and not inside:
                found |= {f"model.{stage}.fwd": forward, f"model.{stage}.bwd": backward}
        return found

    def _ratios(self, busy: BusyTimes, whole_s: float) -> dict[str, tuple[float, float]]:
        """Return (predicted, measured) seconds of a step by kind, for each kind that the plan predicts."""
        prediction, count = None if self._plan is None else self._plan.prediction, len(self._steps)
        if prediction is None or prediction.step_s is None:
            return {}
        found = {}
        for kind, seconds in prediction.step_parts.items():
            if kind in _MEASURED and seconds > 0:
                found[kind] = (seconds, sum(busy.busy_s.get(name, 0.0) for name in _MEASURED[kind]) / count)
        return found | {"step": (prediction.step_s, whole_s / count)}


def _other_rows(sums: Attribution) -> tuple[Row, ...]:
    """Return the rows of all work of the computing thread that is not in a module."""
    rows = [Row("loss outside of the model", 1e-9 * sums.rows[LOSS])] if LOSS in sums.rows else []
    rows += [Row(kind_name(kind), 1e-9 * value) for kind, value in sums.kinds.items()]
    return (*rows, Row("rest of the step", 1e-9 * (sums.rest + sums.rows.get(REST, 0))))


def _stage_names(model: nn.Module, plan: Plan | None) -> list[str]:
    """Return the names of the stages of the plan, or of a plan that will be made."""
    if plan is not None:
        return [stage.name for stage in plan.trace.stages]
    has_parameters = any(True for _ in model.parameters())
    return [unit.path for unit in find_stages(model, Precision()).units] if has_parameters else []


def _summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.items():
            sums[name] = sums.get(name, 0.0) + seconds
    return sums
