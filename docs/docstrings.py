"""Conversion of docstrings, where single backquotes mark code, to reStructuredText."""

from __future__ import annotations

import re
from typing import Any

CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def to_restructured_text(lines: list[str]) -> list[str]:
    """Return the lines of a docstring with marks around its code.

    Code within a line gets double backquotes. An indented block after an empty line becomes a block of code.
    """
    converted: list[str] = []
    is_code = False
    for line in CODE.sub(r"``\1``", "\n".join(lines)).split("\n"):
        if not is_code and line.startswith("    ") and converted and not converted[-1]:
            is_code = not _within_a_section(converted)
            converted += ["::", ""] if is_code else []
        elif line and not line.startswith(" "):
            is_code = False
        converted.append(line)
    return converted


def _within_a_section(lines: list[str]) -> bool:
    """True if the last line without indentation is a title such as `Args:`."""
    outer = [line for line in lines if line and not line.startswith(" ")]
    return bool(outer) and re.fullmatch(r"(Args|Attributes|Returns|Raises|Yields):", outer[-1]) is not None


def _convert(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_restructured_text(lines)


def setup(app: Any) -> None:
    """Register the conversion; it runs before that of the sections `Args`, `Returns` and `Raises`."""
    app.connect("autodoc-process-docstring", _convert, priority=100)
