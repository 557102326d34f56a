"""Attribution of the time of a step to modules and to kinds of work. Plain data in, plain data out."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from headwater.core.recorder import COMPUTE, WAIT, Event, Kind

REST = -1
"""The number of the row of code that belongs to no module."""

Piece = tuple[int, int, int, str]
"""A piece of work of the computing thread: row, begin, end and stage."""


@dataclasses.dataclass(frozen=True)
class Attribution:
    """The time of the computing thread in some steps, in ns.

    Attributes:
        whole: duration of the steps.
        rows: computation by row.
        kinds: time by kind of other work.
        waits: the waits for weights among `kinds`, by the row in which they occurred.
        rest: time that is neither computation nor other work.
    """

    whole: int
    rows: Mapping[int, int]
    kinds: Mapping[str, int]
    waits: Mapping[int, int]
    rest: int


def pieces(
    stamps: Sequence[tuple[int, int]], own: Iterable[Event], begin: int, end: int, kind: Kind = COMPUTE
) -> Iterator[Piece]:
    """Yield the pieces of a step's computation, or of other work. Each belongs to one row of the profile.

    Args:
        stamps: (clock, row) whenever another row begins.
        own: events of the computing thread, in the order of time.
        begin: beginning of the step.
        end: end of the step.
        kind: kind of work.
    """
    place = 0
    for event in own:
        if event.kind != kind:
            continue
        first, last = max(event.begin, begin), min(event.end, end)
        while first < last:
            while place < len(stamps) and stamps[place][0] <= first:
                place += 1
            until = min(last, stamps[place][0]) if place < len(stamps) else last
            yield (stamps[place - 1][1] if place else REST), first, until, event.stage
            first = until


def attribute(
    stamps: Sequence[tuple[int, int]], own: Sequence[Event], steps: Iterable[tuple[int, int]]
) -> Attribution:
    """Return the time of the computing thread by module and by kind of work.

    Args:
        stamps: (clock, row) whenever another row begins.
        own: events of the computing thread, in the order of time.
        steps: begin and end of each step.
    """
    whole, rows, kinds = 0, defaultdict[int, int](int), defaultdict[str, int](int)
    waits = defaultdict[int, int](int)
    for begin, end in steps:
        whole += end - begin
        for row, first, last, _ in pieces(stamps, own, begin, end):
            rows[row] += last - first
        for row, first, last, _ in pieces(stamps, own, begin, end, WAIT):
            waits[row] += last - first
        for event in own:
            length = min(event.end, end) - max(event.begin, begin)
            if event.kind != COMPUTE and length > 0:
                kinds[event.kind] += length
    return Attribution(whole, rows, kinds, waits, whole - sum(rows.values()) - sum(kinds.values()))
