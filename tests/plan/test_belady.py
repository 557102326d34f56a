"""Belady's rule against exhaustive search, and the contract on which the executor relies."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.plan.belady import NEVER, CachePolicy, fetched_positions, replay, slab_capacity

schedules = st.lists(st.integers(0, 4), min_size=1, max_size=7)


def fewest_fetches(sequence: tuple[int, ...], slabs: int) -> int:
    """Return the fewest fetches of `sequence` from empty slabs, over every possible choice of victims."""

    @cache
    def cost(index: int, resident: frozenset[int]) -> int:
        if index == len(sequence):
            return 0
        stage = sequence[index]
        if stage in resident:
            return cost(index + 1, resident)
        if len(resident) < slabs:
            return 1 + cost(index + 1, resident | {stage})
        return 1 + min(cost(index + 1, resident - {victim} | {stage}) for victim in resident)

    return cost(0, frozenset())


def one_class(slabs: int) -> tuple[list[int], dict[int, int]]:
    return [0] * 5, {0: slabs}


@given(schedules, st.integers(1, 4))
def test_the_number_of_fetches_is_minimal_up_to_a_constant(schedule, slabs):
    # Belady looks beyond the horizon of the search, so it may spend some fetches on the rounds that follow.
    rounds = 4
    policy = CachePolicy(schedule, *one_class(slabs))
    fetches = sum(use.fetched for use in replay(policy, rounds))
    best = fewest_fetches(tuple(schedule) * rounds, slabs)
    assert best <= fetches <= best + slabs - 1


@given(schedules, st.integers(1, 4))
def test_more_slabs_never_need_more_fetches(schedule, slabs):
    few, many = (
        set(fetched_positions(CachePolicy(schedule, *one_class(count)))) for count in (slabs, slabs + 1)
    )
    assert many <= few


@given(schedules, st.integers(1, 4))
def test_slabs_are_never_overfilled_and_hold_the_used_stage(schedule, slabs):
    for use in replay(CachePolicy(schedule, *one_class(slabs)), 3):
        assert use.stage in use.resident
        assert len(use.resident) <= slabs


@given(schedules, st.integers(-20, 20), st.integers(0, 4))
def test_next_use_is_the_first_of_upcoming(schedule, position, stage):
    policy = CachePolicy(schedule, *one_class(1))
    expected = [distance for distance, other in policy.upcoming(position) if other == stage]
    assert policy.next_use(stage, position) == (expected[0] if expected else NEVER)


def test_upcoming_uses_are_one_full_round():
    policy = CachePolicy([0, 1, 2], [0, 0, 0], {0: 2})
    assert list(policy.upcoming(1)) == [(1, 2), (2, 0), (3, 1)]


def test_victim_is_the_furthest_of_the_same_class():
    policy = CachePolicy([0, 1, 2, 3, 3, 2, 1, 0], [0, 0, 0, 1], {0: 2, 1: 1})
    assert policy.choose_victim(2, 2, [0, 1]) == 0
    assert policy.choose_victim(2, 2, [3]) is None
    assert policy.choose_victim(2, 2, [2]) is None


def test_prefetch_does_not_evict_a_stage_that_is_used_earlier():
    policy = CachePolicy([0, 1, 2, 3, 3, 2, 1, 0], [0] * 4, {0: 2})
    # While 3 runs backward (position 4), 2 comes at 5, before 1 at 6: it must stay.
    assert policy.choose_victim(1, 4, [2], use_at=6) is None
    # While 2 runs backward, 3 is not needed again in this step and makes room.
    assert policy.choose_victim(1, 5, [3], use_at=6) == 3
    # Positions continue to count in the next step.
    assert policy.choose_victim(1, 4 + 8, [2], use_at=6 + 8) is None


@pytest.mark.parametrize(("slabs", "fetches"), [(2, 8), (3, 6), (5, 2), (6, 0)])
def test_stages_without_a_slab_are_fetched_again(slabs, fetches):
    forward = tuple(range(6))
    policy = CachePolicy(forward + forward[::-1], [7] * 6, {7: slabs})
    assert len(fetched_positions(policy)) == fetches


def test_each_class_has_as_many_slabs_as_stages_at_most():
    assert slab_capacity([64, 64, 64, 128], 2) == {64: 2, 128: 1}
