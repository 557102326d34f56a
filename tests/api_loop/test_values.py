"""Traced values act as tensors in arithmetic; reading one outside of a closure warns."""

import copy
import dataclasses
import pickle
import warnings
from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch

import headwater.api.values as values
from headwater.api.values import TracedValue, TracedValueWarning, reading_is_free, traced, untraced
from headwater.core.errors import StreamError
from headwater.core.trees import map_leaves, map_tensors

READS = {
    "item": (lambda v: v.item(), 2.5),
    "float": (float, 2.5),
    "int": (int, 2),
    "complex": (complex, 2.5 + 0j),
    "bool": (bool, True),
    "if a > b": (lambda v: "yes" if v > 2 else "no", "yes"),
    "max": (lambda v: max(v, v - 1) is v, True),
    "tolist": (lambda v: v.tolist(), 2.5),
    "numpy": (lambda v: v.numpy(), np.float32(2.5)),
    "asarray": (np.asarray, np.float32(2.5)),
    "index": (lambda v: "abc"[v.long()], "c"),
    "repr": (repr, "tensor(2.5000)"),
    "str": (str, "tensor(2.5000)"),
    "f-string": (lambda v: f"{v:.1f}", "2.5"),
    "in": (lambda v: 2.5 in v.reshape(1), True),
    "equal": (lambda v: torch.equal(v, torch.tensor(2.5)), True),
    "allclose": (lambda v: v.allclose(torch.tensor(2.5)), True),
    "cpu, then item": (lambda v: v.cpu().item(), 2.5),
    "item of a derived value": (lambda v: (v * 2 + 1).item(), 6.0),
}


@pytest.fixture(autouse=True)
def not_yet_warned(monkeypatch):
    monkeypatch.setattr(values._has_warned, "value", False)


@pytest.fixture
def value():
    return traced(torch.tensor(2.5, requires_grad=True) * 1)


@pytest.mark.parametrize("name", READS)
def test_reading_a_traced_value_works_and_warns_once_per_line(name, value):
    read, expected = READS[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert read(value) == expected
        assert read(value) == expected
    assert [warning.category for warning in caught] == [TracedValueWarning]
    assert "step_closure" in str(caught[0].message)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("name", READS)
def test_reading_a_known_value_does_not_warn(name, value):
    read, expected = READS[name]
    with reading_is_free():
        assert read(value) == expected


def test_arithmetic_works_and_keeps_no_graph(value):
    total = torch.zeros(())
    total = total + value
    total += value
    mixed = torch.stack([total, value, torch.tensor(1.0)]).mean()
    assert type(mixed) is TracedValue and not mixed.requires_grad and mixed.grad_fn is None
    with reading_is_free():
        assert mixed.item() == pytest.approx(8.5 / 3)


def test_an_untraced_value_shares_memory_with_the_traced_one(value):
    plain = untraced(value)
    assert type(plain) is torch.Tensor and plain.data_ptr() == value.data_ptr()
    assert untraced(plain) is plain


def test_files_and_copies_hold_plain_tensors(value, tmp_path):
    torch.save({"loss": value}, tmp_path / "loss.pt")
    assert type(torch.load(tmp_path / "loss.pt", weights_only=True)["loss"]) is torch.Tensor
    assert type(copy.deepcopy(value)) is torch.Tensor
    assert type(pickle.loads(pickle.dumps(value))) is torch.Tensor


def test_backward_outside_the_step_raises_with_its_right_place(value):
    with pytest.raises(StreamError, match="within the traced function"):
        value.backward()
    weight = torch.tensor(2.0, requires_grad=True)
    (value * weight).backward()
    assert weight.grad == torch.tensor(2.5)


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Output:
    loss: torch.Tensor
    note: str
    more: dict
    made: list = dataclasses.field(init=False, default_factory=list)


def test_map_tensors_changes_only_the_tensors_of_a_tree():
    one = torch.ones(())
    tree = {
        "pair": Pair(one, [one, "text", None]),
        "user": UserDict(a=one, b=(one, 3)),
        "output": Output(one, "note", {"x": one}),
        "class": Output,
    }
    changed = map_tensors(lambda tensor: tensor + 1, tree)
    assert changed["pair"] == Pair(2, [2, "text", None])
    assert type(changed["user"]) is UserDict and changed["user"] == {"a": 2, "b": (2, 3)}
    output = changed["output"]
    assert (output.loss, output.note, output.more, output.made) == (2, "note", {"x": 2}, [])
    assert changed["class"] is Output and tree["output"].loss == 1


def test_leaves_of_a_tree_have_paths():
    paths = []
    tree = {"a": [1, UserDict(b=(2,))], "c": Output(3, "n", {"d": 4})}
    map_leaves(lambda path, leaf: paths.append((path, leaf)), tree, "batch")
    assert paths == [
        ("batch['a'][0]", 1), ("batch['a'][1]['b'][0]", 2),
        ("batch['c'].loss", 3), ("batch['c'].note", "n"), ("batch['c'].more['d']", 4),
    ]  # fmt: skip
