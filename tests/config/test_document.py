"""Documents: values with the places where they were written."""

import pytest

from headwater.config.document import Document, merge, move, put, remove
from headwater.config.origins import Origin, Origins, dotted
from headwater.core.errors import ConfigError

TREE = {"a": {"b": 1, "c": [10, {"d": 2}]}}
ORIGINS = Origins(
    Origin("file", ()),
    {"a": Origins(Origin("file", ("a",), 1), {"b": Origins(Origin("file", ("a", "b"), 2))})},
)
DOCUMENT = Document(TREE, ORIGINS)


def test_values_and_origins_of_missing_keys():
    assert DOCUMENT.get(("a", "c", 1, "d")) == 2
    assert [DOCUMENT.get(path) for path in (("x",), ("a", "c", 2), ("a", "b", "c"))] == [None] * 3
    assert str(DOCUMENT.origin(("a", "b"))) == "file, line 2: a.b"
    assert str(DOCUMENT.origin(("a", "c", 1, "d"))) == "file, line 1: a.c[1].d"


def test_put_returns_a_changed_copy():
    changed = put(DOCUMENT, ("a", "c", "1", "e"), 3, Origin("command line", ("flag",)))
    assert changed.get(("a", "c", 1)) == {"d": 2, "e": 3}
    assert str(changed.origin(("a", "c", 1, "e"))) == "command line: flag"
    assert put(DOCUMENT, ("x", "y"), 1, ORIGINS).get(("x",)) == {"y": 1}
    assert DOCUMENT.tree == {"a": {"b": 1, "c": [10, {"d": 2}]}}
    with pytest.raises(ConfigError, match=r"(?s)expected a position in a list of 2, got 5.*from 0 to 1"):
        put(DOCUMENT, ("a", "c", "5"), 1, ORIGINS)


def test_remove_and_move_take_the_origin_along():
    assert remove(DOCUMENT, ("a", "b")).tree == {"a": {"c": [10, {"d": 2}]}}
    moved = move(DOCUMENT, ("a", "b"), ("z",))
    assert moved.get(("a", "b")) is None and moved.get(("z",)) == 1
    assert str(moved.origin(("z",))) == "file, line 2: a.b"
    assert move(DOCUMENT, ("a", "missing"), ("z",)) is DOCUMENT


def test_merge_replaces_values_key_by_key():
    over = Document({"a": {"b": 5, "n": 6}, "l": [1]}, Origins(Origin("over", ())), ("a notice",))
    merged = merge(DOCUMENT, over)
    assert merged.tree == {"a": {"b": 5, "n": 6, "c": [10, {"d": 2}]}, "l": [1]}
    assert merged.notices == ("a notice",)


def test_locations_of_the_schema_are_found_in_the_document():
    document = Document({"optimizer": {"adamw": {"betas": [0.9]}}})
    location = ("AdamW", "function-before", "betas", 0)
    assert document.locate(("optimizer",), location) == ("optimizer", "adamw", "betas", 0)


def test_a_path_is_written_with_dots_and_positions():
    assert dotted(("a", 0, "b", 1)) == "a[0].b[1]"
