"""Bytes and other quantities as people write and read them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from headwater.core.errors import ConfigError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_FACTORS = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 10**3,
    "m": MIB, "mib": MIB, "mb": 10**6,
    "g": GIB, "gib": GIB, "gb": 10**9,
    "t": TIB, "tib": TIB, "tb": 10**12,
}  # fmt: skip
_NUMBER = r"\s*(\d+(?:\.\d+)?)\s*"
_MOST_DIGITS = 24
"""The most digits before and after the point. Real sizes have fewer, and the value fits a float."""


def parse_bytes(text: str | int | float) -> int:
    """Return the number of bytes that `text` means: `"8GiB"`, `"500 MB"`, `"2g"` or a plain number.

    Raises:
        ConfigError: if it is not a size.
    """
    if isinstance(text, int | float) and not isinstance(text, bool) and 0 <= text < float("inf"):
        return int(text)
    match = re.fullmatch(_NUMBER + r"([a-zA-Z]*)\s*", str(text))
    if match is None or match[2].lower() not in _FACTORS:
        raise ConfigError(
            f"expected a size in bytes, got {text!r}", remedy="write for example 8GiB, 500MB or 4096"
        )
    return round(_short_number(match[1], remedy="write for example 8GiB") * _FACTORS[match[2].lower()])


def parse_rate(text: str | int | float) -> float:
    """Return the bytes per second that `text` means: `"50 GB/s"`, `"1.2 Tbit/s"` or a plain number.

    Raises:
        ConfigError: if it is not a rate.
    """
    if isinstance(text, int | float) and not isinstance(text, bool) and 0 <= text < float("inf"):
        return float(text)
    match = re.fullmatch(_NUMBER + r"([kKMGTP]?)(i?)(bit|b|B)(?:/s|ps)\s*", str(text))
    if match is None:
        raise ConfigError(f"expected a rate, got {text!r}", remedy="write for example 50 GB/s or 100 Gbit/s")
    factor = (1024.0 if match[3] else 1000.0) ** " KMGTP".index(match[2].upper() or " ")
    number = _short_number(match[1], remedy="write for example 50 GB/s")
    return number * factor / (1.0 if match[4] == "B" else 8.0)


def _short_number(digits: str, *, remedy: str) -> float:
    longest = max(map(len, digits.split(".")))
    if longest > _MOST_DIGITS:
        shown = digits if len(digits) <= 2 * _MOST_DIGITS else f"{digits[:_MOST_DIGITS]}…"
        raise ConfigError(
            f"expected a number with at most {_MOST_DIGITS} digits before and after the point, "
            f"found {longest} digits: {shown}",
            remedy=remedy,
        )
    return float(digits)


def format_bytes(count: float) -> str:
    """Return `count` bytes with a binary unit and three significant digits: `1.46 GiB`."""
    return _format(count, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def counted(number: int, one: str, many: str) -> str:
    """Return `number` with its noun: `1 batch`, `2 batches`."""
    return f"{number} {one if number == 1 else many}"


def listed(names: Iterable[str], most: int, separator: str = ", ") -> str:
    """Return the first `most` names and the number of the others as text."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return separator.join(every[:most]) + more


def format_count(count: float) -> str:
    """Return a decimal count with three significant digits: `124 M`."""
    return _format(count, 1000.0, ("", "k", "M", "G", "T", "P"))


_DAY_S = 86400.0
_DURATIONS = (
    *((365.25 * _DAY_S, "years"), (_DAY_S, "days"), (3600.0, "h"), (60.0, "min")),
    *((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
)
_FEWEST = {"years": 2.0}
"""Units that are used only from a larger number on: 400 days are easier to imagine than 1.10 years."""


def format_duration(seconds: float) -> str:
    """Return a duration in the largest unit that fits, with three significant digits: `23.9 h`, `364 ms`.

    From two years on the unit is years of 365.25 days; larger numbers have all their digits: `1,234 years`.
    """
    sign, value = ("-", -seconds) if seconds < 0 else ("", seconds)
    # Three digits round 59.98 s up to "60.0 s"; the margin makes it "1.00 min".
    fitting = (each for each in _DURATIONS if value >= each[0] * _FEWEST.get(each[1], 1.0) * 0.9995)
    factor, unit = next(fitting, _DURATIONS[-1])
    value /= factor
    digits = 0 if value >= 99.95 or value == 0 else 1 if value >= 9.995 else 2
    return f"{sign}{value:,.{digits}f} {unit}"


def _format(value: float, base: float, units: tuple[str, ...]) -> str:
    sign, value = ("-", -value) if value < 0 else ("", value)
    index = 0
    while value >= base * 0.9995 and index < len(units) - 1:
        value /= base
        index += 1
    digits = 0 if index == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{sign}{value:.{digits}f} {units[index]}".rstrip()
