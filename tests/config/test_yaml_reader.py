"""Reading YAML: limits on size, depth and numbers, and errors of the project for whatever a file holds."""

import pytest

from headwater.config.yaml_reader import MAX_BYTES, MAX_DEPTH, parse_scalar, parse_yaml, read_document
from headwater.core.errors import ConfigError

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{index}: &a{index} [{', '.join([f'*a{index - 1}'] * 10)}]\n" for index in range(1, 20)
)
MERGES = "m0: &m0 {x: 1, y: 2}\n" + "".join(
    f"m{index}: &m{index} {{<<: [{', '.join([f'*m{index - 1}'] * 10)}]}}\n" for index in range(1, 20)
)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (LAUGHS, "expected at most 10,000 values, including those of aliases"),
        (MERGES, "expected at most 10,000 values, including those of aliases"),
        ("a: &a [*a]", "a value contains itself"),
        ("a: &a {b: *a}", "a value contains itself"),
        ("a: " + "[" * 3000 + "]" * 3000, f"values are nested deeper than {MAX_DEPTH}"),
        ("a: " + "{b: " * 3000 + "1" + "}" * 3000, f"values are nested deeper than {MAX_DEPTH}"),
        ("a: 1\x00", "U+0000 at position 4"),
        ("a: " + "9" * 5000, "expected a number of at most 64 bits"),
        ("a: 0x" + "f" * 17, "expected a number of at most 64 bits"),
        ("a: !!int many", "expected a number of at most 64 bits, or true or false, found many"),
        ("a: !!bool many", "expected a number of at most 64 bits, or true or false, found many"),
        ("a: 0b_", "expected a number of at most 64 bits"),
        ("a: !!set {x, y}", "the tag !!set is not supported"),
        ("a: !!binary xx", "the tag !!binary is not supported"),
        (
            "a: !!python/object/apply:os.system [ls]",
            "the tag !!python/object/apply:os.system is not supported",
        ),
        ("a: =", "the tag !!value is not supported"),
        ("? [a]\n: 1", "expected text as a key, found a list or mapping"),
        ("? !!str [a]\n: 1", "expected text as a key, found a list or mapping"),
        ("1: a", "expected text as a key, found 1; put it in quotes"),
        ("a: 1\na: 2", "the key a occurs twice in one mapping, with different values"),
        ("a: {b: 1}\na: {b: 1}", "the key a occurs twice in one mapping, with different values"),
    ],
    ids=lambda value: value[:20],
)
def test_an_unreadable_file_is_a_config_error(text, what):
    with pytest.raises(ConfigError) as raised:
        parse_yaml(text, "params.yaml")
    assert what in raised.value.what
    assert len(str(raised.value)) < 1000


def test_a_repeated_key_with_the_same_value_gets_a_notice():
    document = parse_yaml("a: 1\nb:\n  c: x\n  c: x\n", "params.yaml")
    assert document.tree == {"a": 1, "b": {"c": "x"}}
    assert document.notices == ("params.yaml, line 4: c occurs twice, with the same value",)


def test_dates_are_text():
    assert parse_yaml("a: 2024-01-31\nb: 2024-99-99", "params.yaml").tree == {
        "a": "2024-01-31",
        "b": "2024-99-99",
    }


def test_numbers_in_base_60_are_text():
    """YAML 1.1 reads 5:10 as 310, and 1:30.5 as 90.5."""
    values = ["5:10", "1:30", "-2:03:04", "1:30.5", "190:20:30.15"]
    assert parse_yaml("a: [" + ", ".join(values) + "]", "params.yaml").tree == {"a": values}
    numbers = parse_yaml("{a: 12, b: 1_000, c: -3.5, d: 2e-4}", "params.yaml").tree
    assert numbers == {"a": 12, "b": 1000, "c": -3.5, "d": 2e-4}
    assert parse_scalar("5:10") == "5:10"


def test_zeros_at_the_beginning_of_a_number_do_not_make_it_octal():
    """YAML 1.1 reads 010 as 8, and 09 as text."""
    numbers = parse_yaml("{a: 010, b: -007, c: 09, d: 0, e: 0x10, f: 0_10, g: 00.5}", "params.yaml").tree
    assert numbers == {"a": 10, "b": -7, "c": 9, "d": 0, "e": 16, "f": 10, "g": 0.5}
    assert parse_scalar("010") == 10


def test_merge_keys_are_followed():
    document = parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n", "params.yaml")
    assert document.tree == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


def test_a_large_file_is_refused_unread(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text("x" * 10_000_000 + ": 1\n")
    with pytest.raises(ConfigError, match=f"larger than {MAX_BYTES // 1024} KiB"):
        read_document(path)


@pytest.mark.parametrize("text", ["[" * 3000, "&a [*a]", "\x00", "9" * 5000, "a: b: c"])
def test_an_unreadable_value_on_a_command_line_is_text(text):
    assert parse_scalar(text) == text


@pytest.mark.parametrize("text", ["a: 'x" + "y" * 100_000, "k" * 100_000 + ": 1\n" + "k" * 100_000 + ": 2"])
def test_messages_are_short(text):
    with pytest.raises(ConfigError) as raised:
        parse_yaml(text, "params.yaml")
    assert len(str(raised.value)) < 1000


def test_each_value_has_a_line():
    rows = "".join(f"key_{index}: [{', '.join(['1'] * 8)}]\n" for index in range(1000))
    document = parse_yaml(rows, "params.yaml")
    assert document.origin(("key_999", 7)).line == 1000
    assert document.origin(("key_0", 7)).line == 1
