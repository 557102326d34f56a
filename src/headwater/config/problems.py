"""Conversion of a validation error of the schema to a `ConfigError` with file, line, key and remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from headwater.config.base import Section, SectionError, nearest
from headwater.config.document import Document
from headwater.config.origins import KeyPath, dotted
from headwater.config.yaml_reader import parse_scalar
from headwater.core.errors import ConfigError, shorten

_COMMAND_LINE = "command line"
_FEW = 5
"""Number of further problems that an error lists."""

_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping of keys",
    "model_type": "a mapping of keys",
    "is_instance_of": "text",
    "finite_number": "a finite number",
    "none_required": "null",
}
"""The expected value, by pydantic's name of the problem."""

_TYPE_NAMES = {dict: "a mapping", list: "a list", tuple: "a list", type(None): "null"}


def config_error(error: ValidationError, document: Document, root: KeyPath) -> ConfigError:
    """Return an error that describes the first problem in full, and lists the places of the others.

    Args:
        error: pydantic's error for the value at `root` of `document`.
        document: the params, from which the places are taken.
        root: path of the validated value.
    """
    problems: dict[KeyPath, list[ErrorDetails]] = {}
    for details in error.errors():
        problems.setdefault(_path(details, document, root), []).append(details)
    path, first = next(iter(problems.items()))
    where = document.origin(path)
    what, remedy = explain(_name(where.key), first)
    if first[0]["type"] == "choice":
        remedy = _remedy_of_choice(first[0]["ctx"]["names"], path, document) or remedy
    if first[0]["type"] == "value_error":
        written = [document.origin((*path, key)) for key in _keys_named(first[0])]
        # If keys contradict each other, the one on the command line was written last.
        where = next((origin for origin in written if origin.source == _COMMAND_LINE), where)
    # A section of the older form can become several sections of the newer form. Count its problem once.
    others = dict.fromkeys(str(document.origin(other)) for other in problems)
    del others[str(document.origin(path))]
    if others:
        listed = ", ".join([*list(others)[:_FEW], *["…"] * (len(others) > _FEW)])
        what += f" (and {len(others)} more: {listed})"
    return ConfigError(what, where=str(where), remedy=remedy)


def _remedy_of_choice(names: list[str], path: KeyPath, document: Document) -> str | None:
    """Return the remedy if some of these exclusive names come from a file that the params file extends."""
    origins = {name: document.origin((*path, name)) for name in names}
    own = origins[names[-1]].source
    others = [name for name in names if origins[name].source != own]
    if not others or len(others) == len(names):
        return None
    # The user wrote only one of the names; the other comes from the extended file.
    nulls = ", ".join(f"{name}: null" for name in others)
    file = origins[others[0]].source
    return f"{', '.join(others)} is in {file}, which is extended: write {nulls} beside {names[-1]}"


def _path(details: ErrorDetails, document: Document, root: KeyPath) -> KeyPath:
    """Return the path of the key that an error is about: its value is wrong, or it is missing."""
    path = document.locate(root, details["loc"])
    if details["type"] == "unknown_key":
        return (*path, details["ctx"]["key"])
    if details["type"] in _NO_TAG:
        return (*path, _discriminator(details))
    last = details["loc"][-1] if details["loc"] else 0
    return (*path, last) if details["type"] == "missing" and isinstance(last, str) else path


def explain(name: str, found: list[ErrorDetails]) -> tuple[str, str]:
    """Return the message and the remedy for the problems of one key or argument.

    Args:
        name: name of the key.
        found: its problems; several if its type is a union.
    """
    details = found[0]
    context, kind = details.get("ctx", {}), details["type"]
    if kind == "unknown_key":
        valid = context["valid"]
        close = nearest(context["key"], valid)
        listed = f"valid keys: {', '.join(valid)}" if valid else "remove it; this section has no keys"
        return (
            f"unknown key {shorten(context['key'], 80)!r}",
            f"write {close!r}; {listed}" if close else listed,
        )
    if kind == "union_tag_not_found":
        tag = _discriminator(details)
        return f"the key {tag!r} is missing", f"add {tag}"
    if kind == "missing" and isinstance(details["loc"][-1], int):
        return f"{name} has too few entries", f"add an entry to {name}"
    if kind == "missing":
        return f"the key {details['loc'][-1]!r} is missing", f"add {details['loc'][-1]}"
    if kind == "choice":
        names = ", ".join(context["names"])
        what = f"expected one name in {name}, got {names}"
        return what, "keep one and remove the others, or set them to null"
    if kind == "value_error":
        error = context["error"]
        if isinstance(error, SectionError):
            return str(error), error.remedy
        return str(error), f"change {' or '.join(_keys_named(details)) or name}"
    if kind == "size":
        return f"{name}: {details['msg']}", context.get("remedy", f"change {name}")
    return _wrong_value(name, found)


def _keys_named(details: ErrorDetails) -> list[str]:
    """Return the keys of a section that occur in an error message about this section, in that order."""
    words = re.findall(r"[A-Za-z_]\w*", str(details["ctx"]["error"]))
    section = details["input"]
    return [word for word in dict.fromkeys(words) if isinstance(section, dict) and word in section]


def _name(path: KeyPath) -> str:
    """Return the last key of `path`, with the list positions that follow it: `betas[1]`."""
    start = max((index for index, key in enumerate(path) if isinstance(key, str)), default=0)
    return dotted(path[start:])


def _wrong_value(name: str, found: list[ErrorDetails]) -> tuple[str, str]:
    # pydantic also reports a list as too short if its entries are wrong: report only the entries.
    found = [details for details in found if details["type"] != "too_short"] or found
    value = found[0]["ctx"]["tag"] if found[0]["type"] == "union_tag_invalid" else found[0]["input"]
    expected = " or ".join(dict.fromkeys(_expected(details) for details in found))
    kind = _TYPE_NAMES.get(type(value))
    shown = kind or shorten(repr(value), 80)
    if found[0]["type"] in _LENGTHS and isinstance(value, list | tuple):
        shown = f"a list of {_entries(len(value))}"
    literals = [literal for details in found for literal in _literals(details)]
    close = nearest(value, literals) if isinstance(value, str) else None
    what = f"expected {name} to be {expected}, got {shown}"
    if close or len(literals) < 2:
        return what, f"write {_remedy(value, close, expected, found[0])}"
    return what, "write one of these names"


def _remedy(value: Any, close: str | None, expected: str, details: ErrorDetails) -> str:
    """Return what to write instead of `value`."""
    if close:
        return repr(close)
    if isinstance(value, str) and _EXPECTED.get(details["type"]) in (
        "an integer",
        "a number",
        "true or false",
    ):
        meant = parse_scalar(value)
        if isinstance(meant, int | float):
            return f"{value} without quotes"
    section = details.get("ctx", {}).get("class_name") if details["type"] == "model_type" else None
    schema = next((kind for kind in _sections(Section) if kind.__name__ == section), None)
    return f"{expected}: {', '.join(sorted(schema.attributes()))}" if schema else expected


def _sections(kind: type[Section]) -> Iterator[type[Section]]:
    for each in kind.__subclasses__():
        yield each
        yield from _sections(each)


def _expected(details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    if kind in ("literal_error", "union_tag_invalid"):
        return f"one of {', '.join(_literals(details))}"
    bounds = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}
    if kind in bounds:
        return f"a number {bounds[kind]} {next(iter(context.values()))}"
    if kind in _LENGTHS:
        bound, key = _LENGTHS[kind]
        return f"a list of {bound} {_entries(context[key])}"
    return details["msg"]


def _entries(count: int) -> str:
    return f"{count} entry" if count == 1 else f"{count} entries"


_LENGTHS = {"too_short": ("at least", "min_length"), "too_long": ("at most", "max_length")}
"""pydantic's name of a problem with the length of a list -> the kind of bound, and its key in the context."""

_NO_TAG = ("union_tag_invalid", "union_tag_not_found")
"""pydantic's names of the problem that the key which selects a branch of a union is missing or wrong."""


def _discriminator(details: ErrorDetails) -> str:
    """Return the key that selects the branch of a union."""
    return str(details["ctx"]["discriminator"]).strip("'")


def _literals(details: ErrorDetails) -> list[str]:
    if details["type"] not in ("literal_error", "union_tag_invalid"):
        return []
    expected = details["ctx"].get("expected") or details["ctx"]["expected_tags"]
    # pydantic has these names only in a text: 'a', 'b' or 'c'.
    text = str(expected).replace(" or ", ", ")
    return [name.strip("'") for name in text.split(", ")]
