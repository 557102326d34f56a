"""Functions over nested tensors: containers keep their class and their other items."""

import dataclasses
from collections import namedtuple
from types import MappingProxyType

import torch

from headwater.core.trees import map_leaves, map_tensors, tensors_in

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(frozen=True)
class Record:
    values: torch.Tensor
    name: str


class Marked(list):
    """A list with an attribute, which torch does not know."""


def tree():
    marked = Marked([torch.tensor(3)])
    marked.note = "kept"
    return {"a": Pair(torch.tensor(1), 7), "b": Record(torch.tensor(2), "r"), "c": marked, "d": None}


def test_every_tensor_is_changed_and_every_class_stays():
    found = map_tensors(lambda tensor: tensor * 10, tree())
    assert isinstance(found["a"], Pair) and (found["a"].left.item(), found["a"].right) == (10, 7)
    assert found["b"].values.item() == 20 and found["b"].name == "r"
    assert type(found["c"]) is Marked and found["c"][0].item() == 30 and found["c"].note == "kept"
    assert found["d"] is None


def test_the_original_stays_as_it_is():
    before = tree()
    map_tensors(lambda tensor: tensor * 10, before)
    assert [tensor.item() for tensor in tensors_in(before)] == [1, 2, 3]


def test_paths_name_the_place_of_a_leaf():
    paths = []
    map_leaves(lambda path, leaf: paths.append(path), {"a": [1, 2], "b": Record(torch.tensor(0), "r")})
    assert paths == ["['a'][0]", "['a'][1]", "['b'].values", "['b'].name"]


def test_tensors_are_found_in_mappings_that_torch_does_not_know():
    assert [tensor.item() for tensor in tensors_in([MappingProxyType({"x": torch.tensor(5)}), 1])] == [5]
