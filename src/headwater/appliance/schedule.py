"""Which jobs start now: a decision on plain numbers.

Priority first, then age. A job that does not fit reserves what becomes free: behind it only those start that
cannot keep it waiting, whichever of the running jobs ends first. How long jobs take is never guessed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from headwater.appliance.types import Priority


@dataclasses.dataclass(frozen=True)
class Request:
    """A job that waits.

    Attributes:
        number: of the job; the older, the smaller.
        num_csx: CSXs that it needs, all at once.
        priority: what comes first.
    """

    number: int
    num_csx: int
    priority: Priority = Priority.P2


def schedule(waiting: Iterable[Request], held: Iterable[int], free: int) -> list[Request]:
    """The jobs to start now, in order.

    Args:
        waiting: jobs that want to start; none needs more CSXs than there are.
        held: CSXs of each job that runs.
        free: CSXs that nobody has.
    """
    taken = list(held)
    chosen: list[Request] = []
    first: Request | None = None  # of those that must wait
    for request in sorted(waiting, key=lambda request: (request.priority, request.number)):
        if free == 0:
            break
        if request.num_csx > free:
            first = first or request
        elif first is None or not _delays(request.num_csx, first.num_csx - free, taken):
            chosen.append(request)
            taken.append(request.num_csx)
            free -= request.num_csx
    return chosen


def _delays(num_csx: int, missing: int, held: Iterable[int]) -> bool:
    """Whether a job of `num_csx` may keep one waiting that needs `missing` more than are free.

    It may if some of the running jobs together give back enough for that one, and not enough for both.
    """
    sums = 1  # bit n: some of the running jobs have n CSXs together
    for count in held:
        sums |= sums << count
    return bool(sums >> missing & ((1 << num_csx) - 1))


def choose_slots(free: Iterable[int], num_csx: int) -> list[int]:
    """The slots for a job: the first ones, which are next to each other where nothing else runs."""
    return sorted(free)[:num_csx]
