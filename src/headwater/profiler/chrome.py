"""Recorded work in the Trace Event Format of chrome://tracing and Perfetto."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    """Yield the lane, the name and the event of all work to show. Modules cut the computation.

    Waits of threads other than the computing one are left out.
    """
    for row, begin, end in profile.pieces:
        yield "compute", profile.names[row], Event(COMPUTE, "", profile.thread, begin, end, 0)
    for event in profile.events:
        own = event.thread == profile.thread
        if (own and event.kind == COMPUTE) or (not own and event.kind in _WAITS):
            continue
        yield LANE_OF_KIND[event.kind], f"{event.kind} {event.stage}".strip(), event


def chrome_trace(profiles: Sequence[Profile], offsets_ns: Sequence[int] | None = None) -> dict[str, Any]:
    """Return a trace of the ranks of a run, times in microseconds.

    Args:
        profiles: one for each rank.
        offsets_ns: what is added to the clock of each rank; nothing if not given.
    """
    offsets = offsets_ns or [0] * len(profiles)
    zero = min(profile.spans[0][0] + offset for profile, offset in zip(profiles, offsets, strict=True))
    events: list[dict[str, Any]] = []
    for rank, (profile, offset) in enumerate(zip(profiles, offsets, strict=True)):
        name = "Headwater" if len(profiles) == 1 else f"rank {rank}"
        events.append(_named("process_name", rank + 1, 0, name))
        events += _rank_events(profile, rank + 1, offset - zero)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rank_events(profile: Profile, process: int, shift: int) -> Iterator[dict[str, Any]]:
    shown: dict[str, list[tuple[str, Event]]] = {lane: [] for lane in LANES}
    for lane, name, event in shown_events(profile):
        shown[lane].append((name, event))
    number = 0
    for lane, entries in shown.items():
        for index, row in enumerate(_without_overlap(entries)):
            number += 1
            yield _named("thread_name", process, number, lane if not index else f"{lane} {index + 1}")
            yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": number,
                   "args": {"sort_index": number}}  # fmt: skip
            for name, event in row:
                arguments: dict[str, Any] = {"thread": event.thread}
                if event.stage:
                    arguments["stage"] = event.stage
                if event.num_bytes:
                    arguments["bytes"] = event.num_bytes
                yield {
                    "ph": "X",
                    "name": name,
                    "cat": event.kind,
                    "ts": 1e-3 * (event.begin + shift),
                    "dur": 1e-3 * (event.end - event.begin),
                    "pid": process,
                    "tid": number,
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
