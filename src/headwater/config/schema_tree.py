"""A JSON Schema with named definitions, in which schemas of keys can be found and extended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from headwater.config.base import JsonSchema
from headwater.config.origins import KeyPath

Keys = Mapping[str, JsonSchema]
"""Name of a key -> JSON Schema of its values."""
Extra = Callable[[Keys], Keys]

_REFERENCE = "#/$defs/"


def without_effect(why: str) -> JsonSchema:
    """Return the schema of a key that is accepted and has no effect."""
    return {"description": f"Has no effect: {why}.", "deprecated": True}


@dataclasses.dataclass
class SchemaTree:
    """A JSON Schema that is being constructed.

    Attributes:
        root: the schema of the whole document.
        definitions: schemas by name, to which `$ref` refers.
    """

    root: JsonSchema
    definitions: dict[str, JsonSchema]

    def resolve(self, node: JsonSchema) -> JsonSchema:
        """Follow `$ref` and `anyOf` from `node` to the schema of a mapping; return that schema."""
        if "$ref" in node:
            return self.resolve(self.definitions[node["$ref"].removeprefix(_REFERENCE)])
        if "anyOf" in node and "properties" not in node:
            found = [self.resolve(each) for each in node["anyOf"]]
            return next((each for each in found if "properties" in each), node)
        return node

    def at(self, path: KeyPath) -> JsonSchema:
        """Return the schema of the key at `path`."""
        node = self.root
        for key in path:
            node = self.resolve(node)["properties"][key]
        return node

    def variant(self, node: JsonSchema, extra: Extra, name: str) -> JsonSchema:
        """Return a copy of a schema of mappings that accepts further keys.

        Args:
            node: schema of one kind of mapping, or of several alternatives.
            extra: returns the schemas of further keys, given those of the existing keys.
            name: suffix of the names of new definitions.
        """
        if "$ref" in node:
            old = node["$ref"].removeprefix(_REFERENCE)
            new = f"{old}_{name}"
            self.definitions[new] = self.variant(self.definitions[old], extra, name)
            return node | {"$ref": _REFERENCE + new}
        changed: dict[str, Any] = dict(node)
        for key in ("anyOf", "allOf"):
            if key in node:
                changed[key] = [self._branch(each, extra, name) for each in node[key]]
        if "additionalProperties" in node:
            changed["properties"] = {**node["properties"], **extra(node["properties"])}
        return changed

    def _branch(self, node: JsonSchema, extra: Extra, name: str) -> JsonSchema:
        if "then" in node:
            return node | {"then": self.variant(node["then"], extra, name)}
        return self.variant(node, extra, name)
