"""The work of each stage in profiled steps, on all threads. Plain data in, plain data out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from headwater.core.recorder import DISK_READ, DISK_WRITE, FETCH, GRADIENT, UPDATE, WAIT, Event, Kind
from headwater.plan.types import Plan
from headwater.profiler.attribution import Piece
from headwater.profiler.summary import StageWork

_BYTES: Mapping[Kind, str] = {
    FETCH: "weight_bytes",
    GRADIENT: "gradient_bytes",
    DISK_READ: "disk_bytes",
    DISK_WRITE: "disk_bytes",
}


def stage_work(
    computed: Iterable[Piece],
    events: Iterable[Event],
    thread: str,
    steps: Sequence[tuple[int, int]],
    flops: Mapping[str, tuple[int, int]],
) -> tuple[StageWork, ...]:
    """Return the work of each stage that was recorded.

    Args:
        computed: the pieces of computation of all steps.
        events: recorded work of all threads.
        thread: name of the computing thread.
        steps: begin and end of each step, in ns.
        flops: FLOPs of (forward, backward) by stage, in the order of the model.
    """
    sums: _Sums = defaultdict(Counter)
    _add_computation(sums, computed)
    _add_events(sums, events, thread, steps)
    known = [name for name in flops if name in sums]
    known += [name for name in sums if name and name not in flops]
    return tuple(_work_of(name, sums[name], sum(flops.get(name, ()))) for name in known)


_Sums = defaultdict[str, Counter[str]]
"""Stage -> nanoseconds of each kind of work, and bytes under the names of `StageWork`."""


def _add_computation(sums: _Sums, computed: Iterable[Piece]) -> None:
    for row, begin, end, stage in computed:
        if row >= 0:  # code inside of a module
            # The rows of backwards have odd numbers; see `ModuleWatch.names`.
            sums[stage]["backward" if row % 2 else "forward"] += end - begin


def _add_events(sums: _Sums, events: Iterable[Event], thread: str, steps: Sequence[tuple[int, int]]) -> None:
    for event in events:
        of_stage = sums[event.stage]
        inside = sum(max(0, min(event.end, end) - max(event.begin, begin)) for begin, end in steps)
        if event.kind == UPDATE or (event.kind == WAIT and event.thread == thread):
            of_stage[event.kind] += inside
        if event.kind in _BYTES and inside:
            of_stage[_BYTES[event.kind]] += event.num_bytes


def _work_of(name: str, sums: Counter[str], flops: int) -> StageWork:
    """Return the sums of one stage, with times in seconds."""
    return StageWork(
        name,
        forward_s=1e-9 * sums["forward"],
        backward_s=1e-9 * sums["backward"],
        wait_s=1e-9 * sums[WAIT],
        update_s=1e-9 * sums[UPDATE],
        flops=flops,
        weight_bytes=sums["weight_bytes"],
        gradient_bytes=sums["gradient_bytes"],
        disk_bytes=sums["disk_bytes"],
    )


def stage_flops(plan: Plan, num_steps: int) -> dict[str, tuple[int, int]]:
    """Return the FLOPs of (forward, backward) by stage. A forward that runs again counts as backward.

    Args:
        plan: the plan of the steps.
        num_steps: number of steps.
    """
    count, found = plan.num_micro_batches * num_steps, dict[str, tuple[int, int]]()
    for stage, cost, policy in zip(plan.trace.stages, plan.trace.costs, plan.activations, strict=True):
        again = cost.forward.flops if policy.is_recomputed else 0
        found[stage.name] = (count * cost.forward.flops, count * (cost.backward.flops + again))
    return found
