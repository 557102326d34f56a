"""Conversion rules: invertible, and strict in both directions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.convert.rules import TRANSPOSE, Rule, convert, invert
from headwater.core.errors import CheckpointError

RULES = (Rule("a.{}.w.{}", "x.{}.{}.w", TRANSPOSE), Rule("a.{}.b", "x.{}.b"), Rule("c.d", "e"))


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 4), st.integers(1, 4))
def test_there_and_back_is_the_identity(layer, expert, rows, columns):
    tensors = {
        f"a.{layer}.w.{expert}": torch.randn(rows, columns),
        f"a.{layer}.b": torch.randn(rows),
        "c.d": torch.randn(3),
    }
    there = dict(convert(tensors.items(), RULES, tensors, where="there"))
    assert set(there) == {f"x.{layer}.{expert}.w", f"x.{layer}.b", "e"}
    assert there[f"x.{layer}.{expert}.w"].shape == (columns, rows)
    back = dict(convert(there.items(), invert(RULES), there, where="back"))
    assert set(back) == set(tensors)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_one_tensor_is_read_at_a_time():
    read = []

    def source():
        for name in ("a.0.b", "c.d"):
            read.append(name)
            yield name, torch.zeros(1)

    converted = convert(source(), RULES, ["a.0.b", "c.d"], where="here")
    assert read == []
    assert next(converted)[0] == "x.0.b"
    assert read == ["a.0.b"]


def test_unknown_tensor_names_the_nearest():
    pairs = [("a.0.bb", torch.zeros(1))]
    with pytest.raises(CheckpointError, match=r"a\.0\.bb has no place(.|\n)*here(.|\n)*nearest.*a\.0\.b"):
        list(convert(pairs, RULES, ["a.0.b", "c.d"], where="here"))


def test_missing_and_repeated_tensors():
    pair = ("c.d", torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"1 tensors are missing: a\.0\.b"):
        list(convert([pair], RULES, ["a.0.b", "c.d"], where="here"))
    with pytest.raises(CheckpointError, match="twice"):
        list(convert([pair, pair], RULES, ["c.d"], where="here"))
