"""The context in which a rank does work that no other rank does."""

import pytest

from headwater.core.errors import StreamError
from headwater.fabric import membership
from headwater.fabric.fabric import ALONE


@pytest.fixture
def two_ranks(monkeypatch):
    """Return an object that stands for the ranks that were joined; no method of it is called."""
    joined = object()
    monkeypatch.setattr(membership.joined, "value", joined)
    yield joined
    monkeypatch.undo()  # before the exit of the process, which closes what was joined


def test_inside_alone_a_rank_acts_as_a_single_rank(two_ranks):
    assert membership.current() is two_ranks
    with membership.alone("step closure"):
        assert membership.current() is ALONE
    assert membership.current() is two_ranks


def test_inside_alone_a_value_of_all_ranks_is_refused(two_ranks):
    membership.require_all_ranks("a gradient")
    with membership.alone("step closure"), pytest.raises(StreamError) as error:
        membership.require_all_ranks("a gradient")
    assert error.value.what == "a gradient is requested on one rank, but each rank holds only a part of it"
    assert error.value.where == "step closure"


def test_inside_alone_a_single_rank_has_every_value():
    with membership.alone("step closure"):
        membership.require_all_ranks("a gradient")
