"""The time of a rank in a step, by kind of work."""

from __future__ import annotations

from collections.abc import Iterable

from headwater.plan.cluster.timeline import Kind, Timeline

IDLE = "idle"
"""Time in which a rank waits for another rank to compute."""

PARTS = (*(kind.value for kind in Kind), IDLE)


def rank_parts(timeline: Timeline, rank: int) -> dict[str, float]:
    """Return how many seconds of a step one rank spends on each kind of work, or waits for that kind.

    While the rank runs a task, the time counts for the kind of this task. While the rank waits, the time
    counts for the kinds of the tasks that led to its next task. Each of these began when the one before it
    ended.

    Args:
        timeline: the timeline of a step.
        rank: the resource of the rank.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    done_s = 0.0
    for number in timeline.of(rank):
        task = timeline.tasks[number]
        _add_waiting(timeline, task.bound_by, done_s, task.start_s, parts)
        parts[task.kind.value] += task.end_s - task.start_s
        done_s = task.end_s
    _add_waiting(timeline, timeline.last, done_s, timeline.end_s, parts)
    return parts


def mean_parts(timeline: Timeline, ranks: Iterable[int]) -> dict[str, float]:
    """Return the mean of `rank_parts` over `ranks`: seconds of a step by kind of work."""
    every = [rank_parts(timeline, rank) for rank in ranks]
    return {name: sum(parts[name] for parts in every) / len(every) for name in PARTS}


def _add_waiting(
    timeline: Timeline, task: int, start_s: float, end_s: float, parts: dict[str, float]
) -> None:
    """Add the time from `start_s` to `end_s` to the kinds of `task` and of the tasks that it waited for."""
    while task >= 0 and end_s > start_s:
        cause = timeline.tasks[task]
        if cause.start_s < end_s:
            begin_s = max(cause.start_s, start_s)
            name = IDLE if cause.kind is Kind.COMPUTE else cause.kind.value
            parts[name] += end_s - begin_s
            end_s = begin_s
        task = cause.bound_by
    parts[IDLE] += max(end_s - start_s, 0.0)
