"""Recorded work in the Trace Event Format of chrome://tracing and Perfetto."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from headwater.core.recorder import COMPUTE, Event
from headwater.profiler.profile import Profile

LANES = ("compute", "weights in", "gradients out", "update", "disk", "link")
"""The lanes of a trace and of a picture."""

LANE_OF_KIND = {
    "compute": "compute",
    "wait": "compute",
    "input": "compute",
    "fetch": "weights in",
    "gradient": "gradients out",
    "update": "update",
    "disk read": "disk",
    "disk write": "disk",
    "collective": "link",
}

_WAITS = ("wait", "input")


def shown_events(profile: Profile) -> Iterator[tuple[str, str, Event]]:
    """Yield lane, name and event of all work to show. Computation is divided into pieces by module.

    Waits of threads other than the computing one are left out.
    """
    for row, begin, end, stage in profile.pieces:
        yield "compute", profile.names[row], Event(COMPUTE, stage, profile.thread, begin, end, 0)
    for event in profile.events:
        own = event.thread == profile.thread
        if (own and event.kind == COMPUTE) or (not own and event.kind in _WAITS):
            continue
        yield LANE_OF_KIND[event.kind], f"{event.kind} {event.stage}".strip(), event


def joined_trace(ranks: Iterable[Iterable[dict[str, Any]]]) -> dict[str, Any]:
    """Return a trace with the events of all ranks."""
    return {"traceEvents": [event for events in ranks for event in events], "displayTimeUnit": "ms"}


def rank_events(profile: Profile, process: int, name: str, shift: int) -> list[dict[str, Any]]:
    """Return the events of one rank, times in microseconds.

    Args:
        profile: the profile of the rank.
        process: a number that no other rank has.
        name: name of the rank.
        shift: what is added to the clock of the rank, in ns.
    """
    shown: dict[str, list[tuple[str, Event]]] = {lane: [] for lane in LANES}
    for lane, work, event in shown_events(profile):
        shown[lane].append((work, event))
    events, number = [_named("process_name", process, 0, name)], 0
    for lane, entries in shown.items():
        for index, row in enumerate(_without_overlap(entries)):
            number += 1
            events.append(
                _named("thread_name", process, number, lane if not index else f"{lane} {index + 1}")
            )
            events += (_event(work, event, process, number, shift) for work, event in row)
    return events


def _event(work: str, event: Event, process: int, lane: int, shift: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"thread": event.thread}
    if event.stage:
        arguments["stage"] = event.stage
    if event.num_bytes:
        arguments["bytes"] = event.num_bytes
    return {
        "ph": "X",
        "name": work,
        "cat": event.kind,
        "ts": 1e-3 * (event.begin + shift),
        "dur": 1e-3 * (event.end - event.begin),
        "pid": process,
        "tid": lane,
        "args": arguments,
    }


def _without_overlap(entries: Iterable[tuple[str, Event]]) -> list[list[tuple[str, Event]]]:
    """Divide the work of a lane into rows in which nothing overlaps. There is one row at least."""
    rows: list[list[tuple[str, Event]]] = [[]]
    for entry in sorted(entries, key=lambda entry: entry[1].begin):
        free = next((row for row in rows if not row or row[-1][1].end <= entry[1].begin), None)
        if free is None:
            rows.append([entry])
        else:
            free.append(entry)
    return rows


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
