"""Conversion rules: bit-exact round trips, and exactly one rule for each parameter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.convert.rules import Rule, both, map_parameters, permuted, same, stacked, transposed

RULES = (
    transposed("a.{}.w", "x.{}.w"),
    same("a.{}.b", "x.{}.b"),
    stacked("c.{}.w", ["y.{}.q", "y.{}.k"], [2, 1]),
    permuted("d.w", "z", torch.tensor([2, 0, 1])),
)


@given(st.integers(0, 200), st.integers(1, 4), st.integers(1, 4))
def test_split_and_join_are_inverse(layer, rows, columns):
    tensors = {
        f"a.{layer}.w": torch.randn(rows, columns),
        f"a.{layer}.b": torch.randn(rows),
        f"c.{layer}.w": torch.randn(3, columns),
        "d.w": torch.randn(3, columns),
    }
    mapped = map_parameters({name: tuple(tensor.shape) for name, tensor in tensors.items()}, RULES)
    assert [name for each in mapped.values() for name in each.theirs] == [
        f"x.{layer}.w",
        f"x.{layer}.b",
        f"y.{layer}.q",
        f"y.{layer}.k",
        "z",
    ]
    for name, tensor in tensors.items():
        there = mapped[name].rule.split(tensor)
        assert [tuple(part.shape) for part in there] == mapped[name].their_shapes()
        assert torch.equal(mapped[name].rule.join(list(there)), tensor)
    assert mapped[f"a.{layer}.w"].their_shapes() == [(columns, rows)]


def test_permuted_rows_follow_the_order():
    rows = torch.arange(3.0)
    (there,) = RULES[3].split(rows)
    assert there.tolist() == [2.0, 0.0, 1.0]


def test_a_module_has_a_weight_and_a_bias():
    weight, bias = both(same, "a.{}", "b.{}")
    assert weight.names("a.7.weight") == ("b.7.weight",)
    assert bias.names("a.7.bias") == ("b.7.bias",)
    assert bias.names("a.7.weight") is None


def test_every_parameter_has_exactly_one_rule():
    for rules in ((), (same("a", "x"), same("a", "y"))):
        with pytest.raises(AssertionError, match=f"{len(rules)} rules for a"):
            map_parameters({"a": (1,)}, rules)
    with pytest.raises(AssertionError, match="loses a layer number"):
        Rule("a.{}", ("b",))
