"""Sums of recorded work, against sets of instants."""

import itertools
import random

import pytest

from headwater.core.busy import busy_times, common, merged, without
from headwater.core.recorder import (
    COLLECTIVE,
    COMPUTE,
    DISK_READ,
    FETCH,
    INPUT,
    UPDATE,
    WAIT,
    Event,
)


def instants(spans):
    return {moment for begin, end in spans for moment in range(begin, end)}


def random_spans(draw):
    begins = [draw.randrange(60) for _ in range(draw.randrange(8))]
    return [(begin, begin + draw.randrange(1, 15)) for begin in begins]


@pytest.mark.parametrize("seed", range(200))
def test_unions_intersections_and_differences_are_those_of_sets(seed):
    draw = random.Random(seed)
    first, second = random_spans(draw), random_spans(draw)
    one, two = merged(first), merged(second)
    assert instants(one) == instants(first)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(one))
    assert instants(common(one, two)) == instants(first) & instants(second)
    assert instants(without(one, two)) == instants(first) - instants(second)


def event(kind, begin, end, thread="main", num_bytes=0):
    return Event(kind, "", thread, begin * 10**9, end * 10**9, num_bytes)


def times(*events, fetches="memory"):
    return busy_times(events, 0, 10 * 10**9, "main", fetches)


def test_work_of_several_threads_at_once_counts_once():
    found = times(event(DISK_READ, 0, 4, "a", 5), event(DISK_READ, 2, 6, "b", 6))
    assert found.busy_s == {"disk read": 6.0}
    assert found.moved_bytes == {"disk read": 11}


def test_waits_of_other_threads_do_not_count():
    assert times(event(WAIT, 0, 4, "a"), event(WAIT, 5, 6)).busy_s == {"wait": 1.0}


def test_parts_outside_of_the_range_do_not_count():
    found = times(event(COMPUTE, -5, 3), event(INPUT, 9, 12), event(INPUT, 20, 30), event(COMPUTE, -9, -7))
    assert found.busy_s == {"compute": 3.0, "input": 1.0}


def test_a_wait_is_bound_by_what_other_threads_do_meanwhile():
    found = times(
        event(COMPUTE, 0, 2), event(WAIT, 2, 9), event(COLLECTIVE, 9, 10),
        event(UPDATE, 1, 4, "fetch"), event(WAIT, 4, 8, "fetch"), event(DISK_READ, 3, 8, "disk"),
        event(FETCH, 8, 9, "fetch"),
    )  # fmt: skip
    assert found.bound_s == {"compute": 2.0, "memory": 3.0, "disk": 4.0, "link": 1.0}


def test_a_fetch_to_a_gpu_is_bound_by_the_link():
    events = (event(WAIT, 0, 3), event(FETCH, 0, 3, "fetch"))
    assert times(*events).bound_s == {"memory": 3.0}
    assert times(*events, fetches="link").bound_s == {"link": 3.0}
