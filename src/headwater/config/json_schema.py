"""The JSON Schema of params files for editors, generated from the classes that read params files."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Iterator

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from headwater.config.base import ALSO, Choice, JsonSchema, Section, any_case
from headwater.config.common_keys import COMMON_KEYS
from headwater.config.forms import MOVES
from headwater.config.older_schema import older_sections
from headwater.config.run import TrainerConfig
from headwater.config.schema_tree import Keys, SchemaTree, without_effect

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_DESCRIPTION = (
    "Keys, types and values of a Headwater params file. `headwater config validate` also checks which keys "
    "are required, and which values fit together."
)
_MODEL = ("trainer", "init", "model")


def params_schema() -> JsonSchema:
    """Return the JSON Schema (draft 2020-12) of params files in both forms.

    The schema does not require any key: a key may come from a file named by `extends`, or from the command
    line.
    """
    trainer = TrainerConfig.model_json_schema(schema_generator=_Generator)
    definitions = trainer.pop("$defs")
    tree = SchemaTree({"properties": {"trainer": trainer}}, definitions)
    _accept_second_names(tree)
    # Before the second places, which only the newer form accepts.
    sections = older_sections(tree)
    _accept_second_places(tree)
    extends = {"type": "string", "description": "Another params file, or the name of a shipped one."}
    return {
        "$schema": _DIALECT,
        "title": "Headwater params file",
        "description": _DESCRIPTION,
        "type": "object",
        "properties": {"extends": extends, "trainer": tree.at(("trainer",)), **sections},
        "additionalProperties": False,
        "if": {"required": ["trainer"]},
        "then": {"propertyNames": {"enum": ["extends", "trainer"]}},
        "$defs": dict(sorted(tree.definitions.items())),
    }


def _accept_second_names(tree: SchemaTree) -> None:
    """Make the schema accept the names that `also` has recorded, and the older name `image_model`."""
    # A list, because `variant` adds definitions meanwhile.
    for definition in list(tree.definitions.values()):
        properties = definition.get("properties", {})
        for key, node in properties.items():
            if note := node.pop(ALSO, None):
                properties[key] = tree.variant(node, functools.partial(_second_names, note), key)
        if encoder := properties.get("image_encoder"):
            one = {"type": "array", "items": encoder, "minItems": 1, "maxItems": 1}
            properties["image_model"] = {"anyOf": [encoder, one]}


def _second_names(note: JsonSchema, properties: Keys) -> Keys:
    extra = {new: properties[old] for new, old in note["keys"].items()}
    names = {"anyOf": [properties["name"], {"enum": note["names"]}], "description": COMMON_KEYS["name"]}
    return {**extra, "name": names}


def _accept_second_places(tree: SchemaTree) -> None:
    """Make the schema accept the alternative paths of keys in the newer form (`MOVES`)."""
    of_model = {}
    for second, first in MOVES.items():
        if second[:-1] == _MODEL:
            of_model[str(second[-1])] = tree.at(first)
        else:
            tree.resolve(tree.at(second[:-1]))["properties"][second[-1]] = tree.at(first)
    init = tree.resolve(tree.at(_MODEL[:-1]))
    init["properties"]["model"] = tree.variant(tree.at(_MODEL), lambda _: of_model, "trained")


class _Generator(GenerateJsonSchema):
    """A schema generator that adds descriptions from docstrings, and knows a union's branch by its name."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        section = schema["cls"]
        written = super().model_schema(schema)
        if not issubclass(section, Section):
            return written
        written.pop("required", None)
        written["description"] = _summary(section)
        described = _descriptions(section)
        for key, name in section.attributes().items():
            node = written["properties"][key]
            if len(wrapped := node.get("allOf", ())) == 1:  # pydantic before 2.9 wraps a $ref with a default
                node.update(node.pop("allOf")[0] if wrapped[0].keys() == {"$ref"} else {})
            node.pop("title", None)
            if node.get("default") is None or isinstance(node["default"], dict):
                node.pop("default", None)  # the keys of a nested section have their own defaults
            if (mark := section.no_effect(name)) is not None:
                node.update(without_effect(mark.why))
            elif about := described.get(name) or COMMON_KEYS.get(name):
                node["description"] = about
        return _of_choice(written) if issubclass(section, Choice) else written

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        written = super().tagged_union_schema(schema)
        key = written["discriminator"]["propertyName"]
        names: dict[str, list[str]] = {}
        for name, reference in written["discriminator"]["mapping"].items():
            names.setdefault(reference, []).append(name)
        branches = [
            {
                "if": {"required": [key], "properties": {key: {"enum": listed}}},
                "then": {"$ref": reference},
            }
            for reference, listed in names.items()
        ]
        unnamed = {
            "if": {"not": {"required": [key]}},
            "then": {"anyOf": [{"$ref": reference} for reference in names]},
        }
        return {
            "type": "object",
            "properties": {key: {"enum": sorted(itertools.chain.from_iterable(names.values()))}},
            "allOf": [*branches, unnamed],
        }


def _of_choice(written: JsonSchemaValue) -> JsonSchemaValue:
    """Return the schema of a `Choice`: a name, or a mapping with one name as its key, in any case."""
    names = list(written["properties"])
    other_cases = {any_case([name]): node for name, node in written["properties"].items()}
    text = {"anyOf": [{"enum": names}, {"type": "string", "pattern": any_case(names)}]}
    return {
        "description": written["description"],
        "anyOf": [text, {**written, "patternProperties": other_cases}],
    }


def _summary(section: type[Section]) -> str:
    """Return the docstring of a section without its list of attributes."""
    return " ".join((section.__doc__ or "").partition("Attributes:")[0].split())


def _descriptions(section: type[Section]) -> dict[str, str]:
    """Return the description of each attribute, from the docstrings of a section and its base classes."""
    found: dict[str, str] = {}
    # Reversed: the description in a section replaces that in its base class.
    for base in reversed(section.__mro__):
        if issubclass(base, Section):
            found.update(_listed(base.__dict__.get("__doc__") or ""))
    return found


def _listed(docstring: str) -> Iterator[tuple[str, str]]:
    """Yield name and description of each attribute that a docstring lists."""
    # Python 3.13 removes the indentation of docstrings, earlier versions keep it.
    _, _, listed = inspect.cleandoc(docstring).partition("Attributes:\n")
    entries = re.split(r"^ {4}(\w+): ", listed, flags=re.MULTILINE)[1:]
    for name, text in zip(entries[::2], entries[1::2], strict=True):
        words = " ".join(text.split())
        yield name, f"{words[:1].upper()}{words[1:]}"
