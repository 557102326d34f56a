"""The scheduler: decides which jobs start now, as a pure function of numbers.

Jobs are ordered by priority, then by age. If a job does not fit, later jobs are started (backfill) only if
they cannot delay it, in whatever order the running jobs end. The duration of jobs is never estimated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from headwater.appliance.types import Priority


@dataclasses.dataclass(frozen=True)
class Request:
    """A waiting job, as the scheduler sees it.

    Attributes:
        number: number of the job; older jobs have smaller numbers.
        num_csx: CSXs that it needs at the same time.
        priority: its priority.
    """

    number: int
    num_csx: int
    priority: Priority = Priority.P2


def schedule(waiting: Iterable[Request], held: Iterable[int], free: int) -> list[Request]:
    """Return the jobs to start now, in order.

    Args:
        waiting: the waiting jobs. The queue has at least as many CSXs as each of them needs.
        held: number of CSXs of each running job.
        free: number of free CSXs.
    """
    taken = list(held)
    chosen: list[Request] = []
    first: Request | None = None  # the first job that does not fit
    for request in sorted(waiting, key=lambda request: (request.priority, request.number)):
        # Every job needs a CSX.
        if free == 0:
            break
        if request.num_csx > free:
            # Only the first of these jobs is protected from delay.
            first = first or request
        elif first is None or not _delays(request.num_csx, first.num_csx - free, taken):
            chosen.append(request)
            # It counts as running for the jobs behind it.
            taken.append(request.num_csx)
            free -= request.num_csx
    return chosen


def _delays(num_csx: int, missing: int, held: Iterable[int]) -> bool:
    """True if a job with `num_csx` CSXs, started now, could delay the first job that does not fit.

    It could if some of the running jobs together release enough CSXs for the first job, but not for both.

    Args:
        num_csx: CSXs of the job to start now.
        missing: CSXs that the first job needs in addition to the free ones.
        held: number of CSXs of each running job.
    """
    sums = 1  # bit n is set if some subset of the running jobs holds n CSXs
    for count in held:
        sums |= sums << count
    return bool(sums >> missing & ((1 << num_csx) - 1))


def choose_slots(free: Iterable[int], num_csx: int) -> list[int]:
    """Return the slots for a job: the free ones with the smallest numbers, which are often neighbours."""
    return sorted(free)[:num_csx]
