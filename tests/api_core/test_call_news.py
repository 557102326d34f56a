"""The news of a call of a model: each rank has the largest size and the flags of all ranks."""

import dataclasses
from types import SimpleNamespace

from headwater.api.call_news import CallNews
from headwater.fabric.fabric import ALONE

NOTHING = CallNews(
    3, structure=False, trains_more=False, first_training=False, retrained=False, precision=False
)


def merged(every):
    """Return the merged news of each rank."""
    sent = []
    for news in every:  # what each rank sends, then what each makes of all of it
        news.of_any_rank(SimpleNamespace(gather=lambda value: sent.append(value) or [value]))
    return [news.of_any_rank(SimpleNamespace(gather=lambda value: sent)) for news in every]


def test_a_single_rank_keeps_its_call_news():
    news = dataclasses.replace(NOTHING, trains_more=True)
    assert news.of_any_rank(ALONE) == news


def test_each_flag_of_any_rank_is_a_flag_of_all():
    for field in dataclasses.fields(CallNews)[1:]:
        other = dataclasses.replace(NOTHING, **{field.name: True})
        assert merged([NOTHING, other, NOTHING]) == [other] * 3


def test_the_largest_call_of_all_ranks_counts():
    large = dataclasses.replace(NOTHING, size=2**40 + 1, retrained=True)
    assert merged([NOTHING, large]) == [large, large]
