"""Sizes in the form in which people write and read them."""

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from headwater.core.errors import ConfigError
from headwater.core.units import (
    GIB,
    format_bytes,
    format_count,
    format_duration,
    listed,
    parse_bytes,
    parse_rate,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 * GIB),
        (" 8 gib ", 8 * GIB),
        ("8G", 8 * GIB),
        ("2g", 2 * GIB),
        ("500 MB", 500_000_000),
        ("1.5KiB", 1536),
        ("0.5TB", 5 * 10**11),
        ("4096", 4096),
        ("4096b", 4096),
        (4096, 4096),
        (4096.9, 4096),
        (0, 0),
    ],
)
def test_parse(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "8 XB",
        "-1GiB",
        "8 GiB please",
        "1e9",
        True,
        None,
        -1,
        -0.5,
        float("inf"),
        float("nan"),
    ],
)
def test_invalid_sizes_are_refused(text):
    with pytest.raises(ConfigError, match="expected a size in bytes") as caught:
        parse_bytes(text)
    assert "8GiB" in caught.value.remedy


@pytest.mark.parametrize("text", ["1" * 25, "1." + "1" * 25, "9" * 400 + "GiB"])
@pytest.mark.parametrize(("parse", "unit"), [(parse_bytes, ""), (parse_rate, " B/s")])
def test_numbers_with_too_many_digits_are_refused(text, parse, unit):
    number = text.removesuffix("GiB")
    with pytest.raises(ConfigError, match=r"at most 24 digits .* found \d+ digits") as caught:
        parse(number + unit if parse is parse_rate else text)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1.46 * GIB, "1.46 GiB"),
        (99.96 * GIB, "100 GiB"),
        (1023.9 * 1024, "1.00 MiB"),
        (-3 * GIB, "-3.00 GiB"),
        (2000 * 2**50, "2000 PiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7"), (124e6, "124 M"), (1.3e9, "1.30 G"), (999_999, "1.00 M")]
)
def test_format_count(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 µs"),
        (1.71e-3, "1.71 ms"),
        (0.364, "364 ms"),
        (59.4, "59.4 s"),
        (59.98, "1.00 min"),
        (100_000, "1.16 days"),
        (99_999 - 14_000, "23.9 h"),
        (-2000, "-33.3 min"),
        (400 * 86400, "400 days"),
        (730 * 86400, "730 days"),
        (731 * 86400, "2.00 years"),
        (28_140 * 86400, "77.0 years"),
        (1e6 * 86400, "2,738 years"),
    ],
)
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text


@settings(deadline=None)
@given(st.integers(0, 2**49))
@example(1152)
def test_a_formatted_size_parses_to_nearly_the_same(count):
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.0051, abs=1)


def test_a_long_list_of_names_ends_with_the_number_of_the_others():
    assert listed("abc", 3) == "a, b, c"
    assert listed("abcde", 3, "; ") == "a; b; c and 2 more"
    assert listed((), 3) == ""
