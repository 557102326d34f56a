"""Pages of the reference that are made from the code: commands, keys of params files, errors.

`python docs/made_from_code.py` writes them. The pages are committed, so that they can also be read without
the site. A test fails if they are out of date. A build of the site must not write them: the test could then
not see it.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headwater.cli.main import COMMANDS
from headwater.cli.parser import Parser, value_name
from headwater.config.json_schema import params_schema
from headwater.core import errors

DOCS = Path(__file__).resolve().parent
Schema = Mapping[str, Any]
REFERENCE = "#/$defs/"
FIRST = "Init Backend Cluster Disk Precision Loop Checkpoint Logging Fit Validate ValidateAll Optimizer"
"""The sections with which the page of keys begins; the others follow in the order of their names."""


def pages() -> dict[str, str]:
    """Return the text of each page, by its file name."""
    return {
        "all_commands.md": "\n".join(commands_page()) + "\n",
        "all_keys.md": "\n".join(keys_page()) + "\n",
        "all_errors.md": "\n".join(errors_page()) + "\n",
    }


def write_pages() -> None:
    """Write the pages that have changed."""
    for name, text in pages().items():
        path = DOCS / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def cell(text: str) -> str:
    """Return a text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


# Commands


def commands_page() -> Iterator[str]:
    """Yield the lines of the page of commands and their options."""
    yield "# All commands and options"
    yield ""
    yield "This page is made from the code. [Reference](reference.md#commands) explains what the commands do."
    for name, (module, summary) in COMMANDS.items():
        parser = Parser(prog=f"headwater {name}")
        importlib.import_module(module).add_arguments(parser)
        yield from _command(f"headwater {name}", parser, summary)


def _command(name: str, parser: argparse.ArgumentParser, summary: str) -> Iterator[str]:
    nested = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    yield from ("", f"## {name}", "", f"{summary[:1].upper()}{summary[1:]}.")
    rows = [row for row in map(_option, parser._actions) if row]
    if rows:
        yield from ("", "| option | meaning |", "|---|---|", *rows)
    for action in nested:
        helps = {each.dest: each.help or "" for each in action._choices_actions}
        for word, child in action.choices.items():
            if word in helps and helps[word] != argparse.SUPPRESS:
                yield from _command(f"{name} {word}", child, helps[word])


def _option(action: argparse.Action) -> str | None:
    skipped = (argparse._SubParsersAction, argparse._HelpAction)
    if isinstance(action, skipped) or action.help == argparse.SUPPRESS:
        return None
    names = ", ".join(f"`{each}`" for each in action.option_strings)
    value = _value(action)
    if not names:
        names, value = f"`{value.strip() or action.dest}`", ""
    meaning = (action.help or "").replace("%%", "%")
    if "%(default)s" in meaning:
        meaning = meaning.replace("%(default)s", str(action.default))
    if action.required and action.option_strings:
        meaning += " (required)"
    shown = f"{names} `{value.strip()}`" if value.strip() else names
    return f"| {cell(shown)} | {cell(meaning)} |"


def _value(action: argparse.Action) -> str:
    if action.option_strings and action.nargs == 0:
        return ""
    if action.metavar:
        return action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
    if action.choices:
        return "|".join(map(str, action.choices))
    return value_name(action) if action.option_strings else action.dest


# Keys of params files


def keys_page() -> Iterator[str]:
    """Yield the lines of the page of all keys of params files."""
    schema = params_schema()
    definitions = {
        name: each for name, each in schema["$defs"].items() if not re.search(r"_older$|_trained$", name)
    }
    trainer = schema["properties"]["trainer"]
    yield "# All keys of params files"
    yield ""
    yield "This page is made from the classes that read params files."
    yield "[Reference](reference.md#params-files) explains the sections that most runs need."
    yield "A section is a mapping with the keys of its table. Unknown keys are errors."
    yield from _section("trainer", trainer, definitions)
    first = [f"{name}Config" for name in FIRST.split()]
    order = [*first, *sorted((name for name in definitions if name not in first), key=_title)]
    for name in order:
        yield from _section(_title(name), definitions[name], definitions)


def _title(name: str) -> str:
    """Return the title of a section: the class of its schema without its suffix and module."""
    match = re.fullmatch(r"headwater__config__(\w+?)__(\w+)Config", name)
    if match:
        return f"{match[2]} ({match[1]})"
    return name.replace("Config", "").replace("_text_model", " (text model)")


def _anchor(name: str) -> str:
    return re.sub(r"[^\w\- ]", "", _title(name).lower()).replace(" ", "-")


def _section(title: str, schema: Schema, definitions: Mapping[str, Schema]) -> Iterator[str]:
    yield from ("", f"## {title}")
    if about := schema.get("description"):
        yield from ("", cell(about).replace("\\|", "|"))
    properties = schema.get("properties") or _named(schema)
    if not properties:
        return
    yield from ("", "| key | value (default) | meaning |", "|---|---|---|")
    for key, node in properties.items():
        kind = cell(_kind(node))
        default = node.get("default")
        if default not in (None, [], {}):
            kind += f" (`{cell(_plain(default))}`)"
        yield f"| `{key}` | {kind} | {cell(_meaning(node, definitions))} |"


def _meaning(node: Schema, definitions: Mapping[str, Schema]) -> str:
    """Return the description of a key, or else of the section that it refers to."""
    if "description" in node:
        return str(node["description"])
    for each in (node, *node.get("anyOf", ())):
        name = each.get("$ref", each.get("items", {}).get("$ref", "")).removeprefix(REFERENCE)
        if name in definitions:
            return str(definitions[name].get("description", ""))
    return ""


def _named(schema: Schema) -> Mapping[str, Schema]:
    """Return the alternatives of a section that is a name with arguments."""
    for each in schema.get("anyOf", ()):
        if "properties" in each:
            found: Mapping[str, Schema] = each["properties"]
            return found
    return {}


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_plain, value))}]"
    return "null" if value is None else str(value)


def _kind(node: Schema) -> str:
    """Return the type of a value in a few words."""
    if "$ref" in node:
        return _linked(node["$ref"])
    if "enum" in node:
        return ", ".join(f"`{_plain(each)}`" for each in node["enum"])
    if "const" in node:
        return f"`{_plain(node['const'])}`"
    if "allOf" in node:
        branches = [each["then"]["$ref"] for each in node["allOf"] if "$ref" in each.get("then", {})]
        return f"one of {', '.join(dict.fromkeys(map(_linked, branches)))}" if branches else "a section"
    if "anyOf" in node:
        kinds = [
            _kind(each) for each in node["anyOf"] if each.get("type") != "null" and "pattern" not in each
        ]
        return " or ".join(dict.fromkeys(kinds)) or "text"
    if node.get("deprecated"):
        return "any"
    kind = node.get("type", "any")
    if kind == "array" and "prefixItems" in node:
        kinds = [_kind(each) for each in node["prefixItems"]]
        same = len(set(kinds)) == 1
        return f"list of {len(kinds)}: {kinds[0]}" if same else f"list of {'; '.join(kinds)}"
    if kind == "array":
        return f"list of {_kind(node.get('items', {}))}"
    words = {"integer": "int", "number": "number", "boolean": "bool", "string": "text", "object": "mapping"}
    text = words.get(kind, str(kind))
    if node.get("format") == "path":
        text = "path"
    limits = [("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<")]
    bounds = [f"{sign} {node[name]}" for name, sign in limits if name in node]
    return f"{text} {', '.join(bounds)}".strip()


def _linked(reference: str) -> str:
    name = re.sub(r"_(older|trained)$", "", reference.removeprefix(REFERENCE))
    return f"[{_title(name)}](#{_anchor(name)})"


# Errors


def errors_page() -> Iterator[str]:
    """Yield the lines of the page of all errors."""
    yield "# All errors"
    yield ""
    yield "This page is made from `headwater.core.errors`. [Common errors](common_errors.md) says what to do."
    yield from ("", "| exception | kind of | meaning |", "|---|---|---|")
    for name, found in vars(errors).items():
        if inspect.isclass(found) and issubclass(found, errors.HeadwaterError):
            base = found.__bases__[0].__name__
            about = (inspect.getdoc(found) or "").split("\n\n")[0]
            yield f"| `{name}` | `{base}` | {cell(about)} |"


if __name__ == "__main__":
    write_pages()
