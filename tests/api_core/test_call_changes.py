"""Differences between a call and earlier calls: combined over ranks, and what they need."""

import dataclasses
from types import SimpleNamespace

import pytest

from headwater.api.call_changes import CallChanges, Need
from headwater.fabric.fabric import ALONE

NOTHING = CallChanges(
    3, structure=False, trains_more=False, first_training=False, retrained=False, precision=False
)


def merged(every):
    """Return the combined changes of each rank."""
    sent = []
    for changes in every:  # first record what each rank sends, then combine all of it
        changes.of_any_rank(SimpleNamespace(gather=lambda value, *_: sent.append(value) or [value]))
    return [changes.of_any_rank(SimpleNamespace(gather=lambda value, *_: sent)) for changes in every]


def test_a_single_rank_keeps_its_call_changes():
    changes = dataclasses.replace(NOTHING, trains_more=True)
    assert changes.of_any_rank(ALONE) == changes


def test_each_flag_of_any_rank_is_a_flag_of_all():
    for field in dataclasses.fields(CallChanges)[1:]:
        other = dataclasses.replace(NOTHING, **{field.name: True})
        assert merged([NOTHING, other, NOTHING]) == [other] * 3


def test_the_largest_call_of_all_ranks_counts():
    large = dataclasses.replace(NOTHING, size=2**40 + 1, retrained=True)
    assert merged([NOTHING, large]) == [large, large]


@pytest.mark.parametrize(
    ("flags", "largest_size", "need"),
    [
        ((), 3, Need.NOTHING),
        (("retrained",), 3, Need.NOTHING),
        (("first_training",), 3, Need.DRY_RUN),
        ((), 2, Need.PLAN),
        ((), None, Need.PLAN),
        (("first_training",), None, Need.PLAN),
        (("structure",), 3, Need.PLAN),
        (("trains_more", "first_training"), 3, Need.PLAN),
        (("precision",), 3, Need.PLAN),
    ],
)
def test_a_call_needs_a_plan_if_the_present_one_does_not_fit(flags, largest_size, need):
    assert dataclasses.replace(NOTHING, **dict.fromkeys(flags, True)).need(largest_size) is need
