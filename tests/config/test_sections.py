"""Sections: the walk through nested ones, keys without effect, and similar names."""

from typing import Annotated, Any

from pydantic import Field

from headwater.config.base import AsTuple, NoEffect, Section, nearest


class Inner(Section):
    value: int = 0
    unused: Annotated[Any, NoEffect("it is decided elsewhere")] = None


class Outer(Section):
    one: Inner = Inner()
    many: Annotated[tuple[Inner, ...], AsTuple] = ()
    renamed: Inner | None = Field(default=None, alias="re.named")


def test_sections_are_found_with_their_locations():
    outer = Outer.model_validate({"many": [{"value": 1}, {"value": 2}], "re.named": {}})
    found = {location: getattr(section, "value", None) for location, section in outer.sections()}
    assert found == {(): None, ("one",): 0, ("many", 0): 1, ("many", 1): 2, ("re.named",): 0}


def test_only_given_keys_without_effect_have_notices():
    assert list(Inner().notices()) == []
    assert list(Inner(unused=3).notices()) == [("unused", "it is decided elsewhere")]
    assert Inner.no_effect("value") is None


def test_similar_names():
    valid = ("learning_rate", "num_hidden_layers", "hidden_size", "batch_size")
    assert nearest("lerning_rate", valid) == "learning_rate"
    assert nearest("LR", valid) == "learning_rate", "a usual abbreviation"
    assert nearest("hidden", valid) == "hidden_size", "the beginning of a name"
    assert nearest("xyz", valid) is None
    assert nearest("a" * 1_000_000, valid) is None
