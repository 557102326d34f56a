"""Which jobs start: decisions on plain numbers."""

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.appliance.schedule import Request, choose_slots, schedule
from headwater.appliance.types import Priority

TOTAL = 6
SIZES = st.lists(st.integers(1, TOTAL), max_size=8)


def requests(sizes, priorities=None):
    priorities = priorities or [Priority.P2] * len(sizes)
    return [
        Request(number, size, priority)
        for number, (size, priority) in enumerate(zip(sizes, priorities, strict=True))
    ]


def numbers(chosen):
    return [request.number for request in chosen]


def test_priority_comes_before_age_and_age_before_anything_else():
    waiting = requests([1, 1, 1], [Priority.P3, Priority.P2, Priority.P1])
    assert numbers(schedule(waiting, [], 3)) == [2, 1, 0]
    assert numbers(schedule(reversed(requests([1, 1, 1])), [], 2)) == [0, 1]


@pytest.mark.parametrize(
    ("sizes", "held", "chosen"),
    [
        ([2, 1], [1, 1, 1, 1, 1], []),  # a job of one would take the place that the job of two waits for
        ([4, 2], [4], [1]),  # whenever the four end, there are enough for both
        ([4, 2], [2, 2], []),  # with the job of two, the four would have to wait for both
        ([5, 1], [3], [1]),  # of six, five are left when the three end
        ([6, 1], [3], []),
        ([5, 1, 1], [3], [1]),  # a second one would be in the way
    ],
)
def test_backfill(sizes, held, chosen):
    assert numbers(schedule(requests(sizes), held, TOTAL - sum(held))) == chosen


def first_start(sizes, times, held, *, first):
    """When job `first` starts, if all that `schedule` allows start, and jobs take `times`."""
    running = [(time, size) for size, time in held]
    heapq.heapify(running)
    waiting, free, now = requests(sizes), TOTAL - sum(size for size, _ in held), 0
    while True:
        for request in schedule(waiting, [size for _, size in running], free):
            if request.number == first:
                return now
            waiting.remove(request)
            free -= request.num_csx
            heapq.heappush(running, (now + times[request.number], request.num_csx))
        now, size = heapq.heappop(running)
        free += size


@settings(deadline=None)
@given(SIZES.filter(bool), st.data())
def test_backfill_never_delays_the_first_job(sizes, data):
    times = data.draw(st.lists(st.integers(1, 50), min_size=len(sizes), max_size=len(sizes)))
    held, left = [], TOTAL
    for size in data.draw(SIZES):
        if size <= left:
            left -= size
            held.append((size, data.draw(st.integers(1, 50))))
    alone = first_start(sizes[:1], times, held, first=0)
    assert first_start(sizes, times, held, first=0) == alone


@settings(deadline=None)
@given(SIZES, SIZES, st.data())
def test_started_jobs_fit_and_respect_the_order(sizes, held, data):
    free = data.draw(st.integers(0, TOTAL))
    priorities = data.draw(st.lists(st.sampled_from(Priority), min_size=len(sizes), max_size=len(sizes)))
    waiting = requests(sizes, priorities)
    chosen = schedule(waiting, held, free)
    assert sum(request.num_csx for request in chosen) <= free
    ranks = [(request.priority, request.number) for request in chosen]
    assert ranks == sorted(set(ranks))
    if waiting:
        first = min(waiting, key=lambda request: (request.priority, request.number))
        assert (first in chosen) == (first.num_csx <= free)


def test_slots_are_neighbours_if_possible():
    assert choose_slots({5, 1, 2, 0}, 2) == [0, 1]
