"""Containers get their items back, also those of classes that override methods."""

from collections import Counter, OrderedDict, defaultdict, deque

import pytest

from headwater.core.containers import items_of, restore


class MakesItems(OrderedDict):
    """A dictionary that returns an object of a class on each read, like the activations of transformers."""

    def __getitem__(self, key):
        return super().__getitem__(key)()


class ReadOnly(dict):
    """A container that refuses every write."""

    def __setitem__(self, key, value):
        raise TypeError("read only")

    def copy(self):
        raise TypeError("not copied")


def grown(container):
    kind = next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(container, kind))
    if issubclass(kind, dict):
        kind.__setitem__(container, "new", 1)
    elif kind is set:
        container.add("new")
    else:
        container.append("new")


@pytest.mark.parametrize(
    "container",
    [
        {"b": 1, "a": 2},
        OrderedDict(b=1, a=2),
        MakesItems(b=list, a=dict),
        ReadOnly(b=1),
        defaultdict(list, b=[1]),
        Counter("abba"),
        ["b", "a"],
        {"b"},
        deque(["b", "a"], maxlen=2),
    ],
    ids=lambda container: type(container).__name__,
)
def test_items_come_back_in_their_order(container):
    before = items_of(container)
    grown(container)
    assert items_of(container) != before
    restore(container, before)
    assert items_of(container) == before


def test_a_container_that_did_not_change_is_not_written_to():
    class Unwritten(dict):
        def clear(self):
            raise AssertionError("cleared")

    container = Unwritten(a=[1])
    restore(container, items_of(container))
    assert container == {"a": [1]}


def test_an_ordered_dictionary_keeps_an_order_that_was_changed_in_place():
    container = OrderedDict(a=1, b=2)
    container.move_to_end("a")
    before = items_of(container)
    container.move_to_end("b")
    restore(container, before)
    assert list(container) == ["b", "a"]
