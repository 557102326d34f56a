"""Rules that choose a value by the name of a parameter."""

from headwater.models.layers.initializers import BIASES_AND_NORMS, first_match


def test_the_first_rule_that_matches_the_whole_name_counts():
    rules = ((r"a\.\d", 1), (r"a\..*", 2), (r"b", 3))
    assert [first_match(name, rules) for name in ("a.7", "a.77", "b", "bb")] == [1, 2, 3, None]


def test_biases_are_zero_and_norms_one():
    names = (
        "attention.qkv.bias",
        "ffn_norm.weight",
        "norm.weight",
        "norm.bias",
        "debias",
        "embedding.weight",
    )
    found = [first_match(name, BIASES_AND_NORMS) for name in names]
    assert [each and each.name for each in found] == ["zeros", "ones", "ones", "zeros", None, None]
