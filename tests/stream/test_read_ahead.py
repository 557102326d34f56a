"""The uses that are prepared ahead of the computation are those of its schedule, in order, and no others."""

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from headwater.plan.belady import CachePolicy
from headwater.stream.read_ahead import ReadAhead


def ahead_of(schedule, *, repeats=False):
    return ReadAhead(CachePolicy(schedule, [8] * 5, {8: 2}), repeats=repeats)


def without_repetitions(stages):
    """Return the stages without equal neighbours: a use that follows one of its stage is the same use."""
    return [stage for stage, _ in groupby(stages)]


SCHEDULES = st.lists(st.integers(0, 4), min_size=1, max_size=12).map(without_repetitions)


@given(SCHEDULES, st.lists(st.integers(0, 3), max_size=12), st.booleans())
def test_each_use_is_prepared_once_and_before_it_comes(schedule, counts, repeats):
    ahead, prepared = ahead_of(schedule, repeats=repeats), []
    for position, stage in enumerate(schedule):
        ahead.move_to(stage)
        assert ahead.position == position
        wanted = counts[position] if position < len(counts) else 0  # number of free slabs
        for _, (found, use_at) in zip(range(wanted), ahead.uses(), strict=False):
            ahead.note_fetched(use_at)
            prepared.append((found, use_at))
    positions = [use_at for _, use_at in prepared]
    assert positions == sorted(set(positions))
    assert all(found == schedule[use_at % len(schedule)] for found, use_at in prepared)
    assert repeats or all(use_at < len(schedule) for use_at in positions)


@given(SCHEDULES)
def test_a_schedule_that_repeats_is_prepared_one_round_ahead(schedule):
    ahead = ahead_of(schedule, repeats=True)
    ahead.move_to(schedule[0])
    rounds = [*schedule, *schedule]
    expected = [(rounds[position], position) for position in range(1, len(schedule) + 1)]
    assert list(ahead.uses()) == expected


def test_a_use_that_found_no_slab_is_prepared_later():
    ahead = ahead_of([0, 1, 2, 3])
    ahead.move_to(0)
    assert next(ahead.uses()) == (1, 1)
    assert list(ahead.uses()) == [(1, 1), (2, 2), (3, 3)]


def test_after_an_eviction_all_uses_are_looked_at_again():
    ahead = ahead_of([0, 1, 2, 3])
    ahead.move_to(0)
    ahead.note_fetched(3)
    assert list(ahead.uses()) == []
    ahead.restart()
    assert list(ahead.uses()) == [(1, 1), (2, 2), (3, 3)]


def test_an_empty_schedule_has_no_uses():
    ahead = ahead_of([])
    ahead.move_to(2)
    assert list(ahead.uses()) == []
