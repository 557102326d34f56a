"""Takes a profile: wraps the calls of modules for some steps, then sums the recorded times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from torch import nn

from headwater.core.busy import BusyTimes, busy_times, fetch_bound
from headwater.core.precision import Precision
from headwater.core.recorder import RECORDER, Event
from headwater.plan.partition import find_stages
from headwater.plan.types import Plan
from headwater.profiler.attribution import REST, attribute, pieces
from headwater.profiler.modules import LOSS, ModuleWatch, profiled_modules
from headwater.profiler.operators import OperatorWatch
from headwater.profiler.profile import Profile, Row, kind_name


@final
class ProfiledSteps:
    """A profile that is being taken on the calling thread. Calls of modules are wrapped until `finish`.

    Args:
        model: the model; `None` to time no modules.
        plan: the plan of the steps, if there is one.
        depth: levels of modules with rows below the module of a stage.
        operators: record the operators inside the modules too. This slows the steps down.
    """

    def __init__(
        self, model: nn.Module | None, plan: Plan | None, *, depth: int = 1, operators: bool = False
    ) -> None:
        modules = {} if model is None else profiled_modules(model, _stage_names(model, plan), depth)
        self._plan = plan
        self._modules = modules
        self._watch = ModuleWatch(modules)
        self._operators = OperatorWatch() if operators else None
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
        """Remove the wrappers around the calls of modules."""
        self._watch.close()
        if self._operators is not None:
            self._operators.stop()

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
        rows = sorted(sums.rows, key=lambda row: -sums.rows[row])
        flops = self._flops()
        modules = [
            Row(
                names[row],
                1e-9 * sums.rows[row],
                self._watch.calls[row - row % 2],
                flops.get(names[row], 0) * len(self._steps),
            )
            for row in rows
            if row >= 0
        ]
        others = [Row(kind_name(kind), 1e-9 * value) for kind, value in sums.kinds.items()]
        if LOSS in sums.rows:
            others.insert(0, Row("loss outside of the model", 1e-9 * sums.rows[LOSS]))
        others.append(Row("rest of the step", 1e-9 * (sums.rest + sums.rows.get(REST, 0))))
        return Profile(
            steps=self._steps,
            spans=self._spans,
            modules=modules,
            others=others,
            busy=self._busy(thread),
            events=self._events,
            pieces=[piece for begin, end in self._spans for piece in pieces(stamps, own, begin, end)],
            names=names,
            thread=thread,
            plan=self._plan,
            operators=None if self._operators is None else self._operators.table(stamps, names),
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

    def _flops(self) -> dict[str, int]:
        """Return the FLOPs of a step by row, for modules that are all of a stage and have no row inside."""
        if self._plan is None:
            return {}
        found = {}
        trace, count = self._plan.trace, self._plan.num_micro_batches
        for stage, cost in zip(trace.stages, trace.costs, strict=True):
            inside = [path for path in self._modules if path.startswith(f"{stage.name}.")]
            if stage.name in self._modules and stage.name and not inside:
                found[f"model.{stage.name}.fwd"] = count * cost.flops
                found[f"model.{stage.name}.bwd"] = count * cost.backward_flops
        return found


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
