"""A params file as nested plain data, with the file, line and key from which each value came."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from headwater.config.origins import NOWHERE, KeyPath, Origin, Origins
from headwater.core.errors import ConfigError, shorten


@dataclasses.dataclass(frozen=True)
class Document:
    """Nested mappings, lists and scalars with their origins. Immutable: functions return new documents.

    Attributes:
        tree: the values.
        origins: the place where each value was written.
        notices: messages for the user about keys that were removed from `tree`.
    """

    tree: dict[str, Any]
    origins: Origins = NOWHERE
    notices: tuple[str, ...] = ()

    def origin(self, path: KeyPath) -> Origin:
        """Return the place where the value at `path` is written, or where to write it if it is missing."""
        return self.origins.nearest(path)

    def get(self, path: KeyPath) -> Any:
        """Return the value at `path`, or `None` if it is missing."""
        value: Any = self.tree
        for key in path:
            found = (
                key in value
                if isinstance(value, dict)
                else isinstance(value, list) and key in range(len(value))
            )
            if not found:
                return None
            value = value[key]
        return value

    def locate(self, root: KeyPath, location: KeyPath) -> KeyPath:
        """Return the path in this document that a location in an error of pydantic means.

        A location can contain items that are not in the document: branches of unions, positions in a list for
        which a single value was written, and names in another case. Items that match no key are skipped.

        Args:
            root: path of the value that was validated.
            location: location below `root`, as pydantic reports it.
        """
        path, value = root, self.get(root)
        for item in location:
            key = _step(value, item)
            if key is not None:
                path, value = (*path, key), value[key]
        return path

    def with_notice(self, notice: str) -> Document:
        """Return a copy of the document with one more notice."""
        return dataclasses.replace(self, notices=(*self.notices, notice))


def _step(value: Any, item: str | int) -> str | int | None:
    if isinstance(value, list):
        return item if isinstance(item, int) and item < len(value) else None
    if not isinstance(value, dict):
        return None
    # The exact key first: other keys may differ from it in case alone.
    return next((key for key in (item, *value) if key in value and _same(key, item)), None)


def _same(key: str | int, item: str | int) -> bool:
    return str(key).lower() == str(item).lower()


def no_effect(origin: Origin, why: str) -> str:
    """Return the notice that the key at `origin` has no effect."""
    return f"{origin} has no effect: {why}"


def put(document: Document, path: KeyPath, value: Any, origins: Origins | Origin) -> Document:
    """Return a copy of `document` with `value` at `path`. Missing mappings on the path are created.

    Args:
        document: the document.
        path: path of the value.
        value: the new value.
        origins: origin of the value and of the mappings that are created, or the origins of the value and of
            the values in it.

    Raises:
        ConfigError: if the path contains a position that is not in a list of the document.
    """
    placed = Origins(origins) if isinstance(origins, Origin) else origins
    # A misspelt mapping on the path exists only because of this value. Its place is the place of the value.
    created = Origins(origins) if isinstance(origins, Origin) else NOWHERE
    tree, all_origins = _put(
        document.tree, document.origins, path, (value, placed), (document.origin(path), created)
    )
    return Document(tree, all_origins, document.notices)


def _put(
    tree: Any,
    origins: Origins,
    path: KeyPath,
    placed: tuple[Any, Origins],
    places: tuple[Origin, Origins],
) -> tuple[Any, Origins]:
    """Return a tree and its origins with the value and origins `placed` at `path`.

    Args:
        tree: the tree.
        origins: its origins.
        path: path of the value.
        placed: the value and its origins.
        places: the place of a wrong position in a list, and the origins of a mapping that is created.
    """
    origin, created = places
    if not path:
        return placed
    key, rest = path[0], path[1:]
    if isinstance(tree, list):
        key = _position(tree, key, origin)
        below, inside = _put(tree[key], origins.at((key,)), rest, placed, places)
        return [*tree[:key], below, *tree[key + 1 :]], origins.replaced(key, inside)
    if not isinstance(tree, dict):
        tree, origins = {}, created
    below, inside = _put(tree.get(key), origins.at((key,)), rest, placed, places)
    return {**tree, key: below}, origins.replaced(key, inside)


def _position(entries: list[Any], key: str | int, origin: Origin) -> int:
    # At most nine digits: Python refuses to convert very long numbers.
    if re.fullmatch("[0-9]{1,9}", str(key)) and int(key) < len(entries):
        return int(key)
    raise ConfigError(
        f"expected a position in a list of {len(entries)}, got {shorten(str(key), 80)}",
        where=str(origin),
        remedy=f"write a number from 0 to {len(entries) - 1}" if entries else "write the list in the file",
    )


def remove(document: Document, path: KeyPath) -> Document:
    """Return a copy of `document` without the key at `path`, which must be in a mapping."""
    parent, above = document.get(path[:-1]), document.origins.at(path[:-1])
    rest = {key: value for key, value in parent.items() if key != path[-1]}
    return put(document, path[:-1], rest, above.without(path[-1]))


def move(document: Document, old: KeyPath, new: KeyPath) -> Document:
    """Return a copy of `document` with the value at `old` moved to `new`; unchanged if `old` is missing.

    Args:
        document: the document.
        old: path of the value.
        new: new path of the value.

    Raises:
        ConfigError: if `new` contains a position that is not in a list of the document.
    """
    parent = document.get(old[:-1])
    if not isinstance(parent, dict) or old[-1] not in parent:
        return document
    return put(remove(document, old), new, parent[old[-1]], document.origins.at(old))


def merge(base: Document, over: Document) -> Document:
    """Return `base` with the values of `over`: mappings are merged key by key, other values are replaced."""
    tree = _merge(base.tree, over.tree)
    return Document(tree, base.origins.merged(over.origins), base.notices + over.notices)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
