"""Copies of the options and attributes of a user's optimizer, and their comparison with the original."""

import dataclasses
from collections import deque

import numpy as np
import pytest
import torch

from headwater.optim.attributes import copied, is_same


@dataclasses.dataclass(slots=True, frozen=True)
class Slotted:
    factor: float
    items: list


class Linked:
    """An object that refers to its parent, as lists of configuration libraries do."""

    def __init__(self, parent=None):
        self.parent = parent
        self.child = Linked(self) if parent is None else None


class OpenFile:
    """An object that closes something when it ends."""

    closed = 0

    def __del__(self):
        OpenFile.closed += 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: [1, {"a": (2.0, torch.ones(2))}],
        lambda: deque([1, np.arange(3)]),
        lambda: {1, 2},
        lambda: Slotted(0.5, [1]),
        lambda: [Linked()],
    ],
)
def test_a_copy_equals_its_original_and_an_equal_object(make):
    value = make()
    assert is_same(copied(value), value)
    assert is_same(make(), value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [1, 3]),
        ({"a": 1}, {"b": 1}),
        (Slotted(0.5, [1]), Slotted(0.5, [2])),
        (np.zeros(2), np.zeros(2, dtype=np.float32)),
        (1, 1.0),
    ],
)
def test_objects_with_other_content_differ(one, other):
    assert not is_same(one, other)


def test_later_changes_of_the_original_do_not_reach_the_copy():
    value = Slotted(0.5, [1])
    copy = copied(value)
    value.items.append(2)
    assert copy.items == [1]
    assert not is_same(copy, value)


def test_an_object_that_closes_something_at_its_end_is_not_copied():
    value = {"log": OpenFile()}
    copy = copied(value)
    assert copy["log"] is value["log"]
    del copy
    assert OpenFile.closed == 0
