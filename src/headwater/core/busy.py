"""Sums of recorded work: how long each kind of work ran, and what limited the computing thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from headwater.core.recorder import (
    COLLECTIVE,
    COMPUTE,
    DISK_READ,
    DISK_WRITE,
    FETCH,
    GRADIENT,
    INPUT,
    UPDATE,
    WAIT,
    Event,
    Kind,
)

Bound = Literal["compute", "memory", "disk", "link", "input"]
"""The part of a machine that limits a step; `input` is the data loader."""

BOUNDS: tuple[Bound, ...] = ("compute", "memory", "disk", "link", "input")

Intervals = list[tuple[int, int]]
"""Ranges of time (begin, end), in order and without overlap."""

_OWN: Mapping[Kind, Bound] = {
    COMPUTE: "compute",
    UPDATE: "memory",
    FETCH: "memory",
    GRADIENT: "memory",
    DISK_READ: "disk",
    DISK_WRITE: "disk",
    COLLECTIVE: "link",
    INPUT: "input",
}


@dataclasses.dataclass(frozen=True)
class BusyTimes:
    """The seconds of a step in which each kind of work ran, and which part of the machine limited it.

    Attributes:
        busy_s: by kind, the seconds in which at least one thread did this work. Waits are those of the
            computing thread alone.
        bound_s: by part of the machine, the seconds of the computing thread that this part limited.
        moved_bytes: by kind, the bytes that were moved.
    """

    busy_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bound_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    moved_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)


def fetch_bound(device: str) -> Bound:
    """Return the part of the machine that limits a fetch (a copy of weights to a slab) on this device."""
    return "memory" if device == "cpu" else "link"


def busy_times(
    events: Iterable[Event], begin: int, end: int, thread: str, fetches: Bound = "memory"
) -> BusyTimes:
    """Return the seconds and bytes of each kind of work in a range of time, and what limited the thread.

    Args:
        events: the events; parts outside of the range do not count.
        begin: beginning of the range, in ns.
        end: end of the range, in ns.
        thread: name of the computing thread.
        fetches: what limits a fetch: `memory` if the copy stays in host memory, else `link`.
    """
    own: dict[Kind, list[tuple[int, int]]] = {}
    others: dict[Kind, list[tuple[int, int]]] = {}
    moved: dict[str, int] = {}
    for kind, _, name, first, last, num_bytes in events:
        if last <= begin or first >= end:
            continue
        where = own if name == thread else others
        where.setdefault(kind, []).append((max(first, begin), min(last, end)))
        if num_bytes:
            moved[kind] = moved.get(kind, 0) + num_bytes
    busy: dict[str, float] = {}
    for kind in (*own, *(kind for kind in others if kind not in own)):
        spans = own.get(kind, [])
        if kind != WAIT:
            spans = spans + others.get(kind, [])
        if spans:
            busy[kind] = _seconds(merged(spans))
    return BusyTimes(busy, _bounds(own, others, fetches), moved)


def _bounds(
    own: Mapping[Kind, Sequence[tuple[int, int]]],
    others: Mapping[Kind, Sequence[tuple[int, int]]],
    fetches: Bound,
) -> dict[str, float]:
    """Divide the time of the computing thread among the parts of the machine that limit it."""
    seconds: dict[Bound, float] = dict.fromkeys(BOUNDS, 0.0)
    for kind, spans in own.items():
        if kind != WAIT:
            seconds[_OWN[kind]] += _seconds(merged(spans))
    waiting = merged(own.get(WAIT, []))
    # In this order: if a thread updates or copies at a moment, that limits the wait, and not a disk transfer
    # that runs at the same time.
    limits: tuple[tuple[tuple[Kind, ...], Bound], ...] = (
        ((UPDATE, GRADIENT), "memory"),
        ((FETCH,), fetches),
        ((COLLECTIVE,), "link"),
        ((DISK_READ, DISK_WRITE), "disk"),
    )
    for kinds, bound in limits:
        if not waiting:
            break
        busy = merged([span for kind in kinds for span in others.get(kind, [])])
        shared = common(waiting, busy)
        seconds[bound] += _seconds(shared)
        waiting = without(waiting, shared)
    return {str(bound): value for bound, value in seconds.items() if value}


def merged(spans: Iterable[tuple[int, int]]) -> Intervals:
    """Return the union of ranges of time."""
    result: Intervals = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            if end > result[-1][1]:
                result[-1] = (result[-1][0], end)
        else:
            result.append((begin, end))
    return result


def common(first: Intervals, second: Intervals) -> Intervals:
    """Return the ranges of time that are in both lists."""
    result, i, j = list[tuple[int, int]](), 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            result.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return result


def without(first: Intervals, second: Intervals) -> Intervals:
    """Return the ranges of time in `first` that are not in `second`."""
    result, j = list[tuple[int, int]](), 0
    for begin, end in first:
        while j < len(second) and second[j][1] <= begin:
            j += 1
        k = j
        while k < len(second) and second[k][0] < end:
            if second[k][0] > begin:
                result.append((begin, second[k][0]))
            begin = max(begin, second[k][1])
            k += 1
        if begin < end:
            result.append((begin, end))
    return result


def _seconds(intervals: Intervals) -> float:
    return 1e-9 * sum(end - begin for begin, end in intervals)
