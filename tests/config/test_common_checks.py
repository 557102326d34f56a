"""Checks and effective values that the sections of several model families share."""

import pytest

from headwater.config.models.common import (
    attention_scale,
    check_both_or_none,
    check_heads,
    first_given,
    growth,
    mup_logits_scale,
    with_defaults,
)
from headwater.config.models.encoder import EncoderSection


def test_absent_values_have_defaults_and_zero_is_a_value():
    assert (first_given(None, 0.1), first_given(0.0, 0.1)) == (0.1, 0.0)


def test_growth_and_logits_scale_are_one_without_mup():
    assert (growth(64, None), growth(64, 16)) == (1, 4)
    assert mup_logits_scale(3.0, 64, None) == 1
    assert mup_logits_scale(None, 64, 16) == 1 / 4
    assert mup_logits_scale(3.0, 64, 16) == 3 / 4


def test_attention_scale():
    assert (attention_scale("dot_product", 16), attention_scale("scaled_dot_product", 16)) == (1, 0.25)


def test_heads_share_the_width_equally():
    check_heads(64, 4)
    with pytest.raises(ValueError, match=r"attention_inner_dim \(65\) is not a multiple of num_heads \(4\)"):
        check_heads(65, 4, "attention_inner_dim")


def test_one_of_two_keys_that_belong_together_is_refused():
    keys = ("mup_base_hidden_size", "mup_base_filter_size")
    check_both_or_none(EncoderSection(), *keys)
    with pytest.raises(ValueError, match="expected both or none of mup_base_hidden_size"):
        EncoderSection(mup_base_hidden_size=16.0)


def test_defaults_of_a_family_give_way_to_written_keys():
    families = {"wide": {"width": 8, "bias": False}}
    assert with_defaults({"name": "wide", "bias": True}, families) == {
        "name": "wide",
        "width": 8,
        "bias": True,
    }
    assert with_defaults({}, families, "wide") == {"width": 8, "bias": False}
    assert with_defaults({"name": "other"}, families) == {"name": "other"}
    assert with_defaults("text", families) == "text"
