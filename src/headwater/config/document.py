"""A params file as read: nested plain data, and for each key the file, line and spelling it came from."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from headwater.config.origins import NOWHERE, KeyPath, Origin, Origins
from headwater.core.errors import ConfigError, shorten


@dataclasses.dataclass(frozen=True)
class Document:
    """Nested mappings, lists and scalars with their origins. Functions make new ones, none changes one.

    Attributes:
        tree: the values.
        origins: where each was written.
        notices: what to tell the user about keys that are no longer in `tree`.
    """

    tree: dict[str, Any]
    origins: Origins = NOWHERE
    notices: tuple[str, ...] = ()

    def origin(self, path: KeyPath) -> Origin:
        """Where the value at `path` was written, or would be: told by its nearest recorded ancestor."""
        return self.origins.nearest(path)

    def get(self, path: KeyPath) -> Any:
        """The value at `path`; `None` where there is none."""
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
        """The path below `root` that `location` in the schema means.

        The schema also names branches of unions, and sees lists where a single value stands for one, and
        spells names of alternatives in the canonical case: only what leads somewhere here counts.
        """
        path, value = root, self.get(root)
        for item in location:
            key = _step(value, item)
            if key is not None:
                path, value = (*path, key), value[key]
        return path

    def with_notice(self, notice: str) -> Document:
        """Return the same document with one more notice."""
        return dataclasses.replace(self, notices=(*self.notices, notice))


def _step(value: Any, item: str | int) -> str | int | None:
    if isinstance(value, list):
        return item if isinstance(item, int) and item < len(value) else None
    if not isinstance(value, dict):
        return None
    return next((key for key in (item, *value) if key in value and _same(key, item)), None)


def _same(key: str | int, item: str | int) -> bool:
    return str(key).lower() == str(item).lower()


def no_effect(origin: Origin, why: str) -> str:
    """The notice for a key that is accepted and changes nothing."""
    return f"{origin} has no effect: {why}"


def put(document: Document, path: KeyPath, value: Any, origins: Origins | Origin) -> Document:
    """Return `document` with `value` at `path`; mappings on the way are made, lists must reach so far.

    Args:
        document: what to put it in.
        path: where.
        value: what.
        origins: where the value was written, and what is in it.

    Raises:
        ConfigError: if the path leads through a list that has no such position.
    """
    placed = Origins(origins) if isinstance(origins, Origin) else origins
    tree, all_origins = _put(document.tree, document.origins, path, (value, placed), document.origin(path))
    return Document(tree, all_origins, document.notices)


def _put(
    tree: Any, origins: Origins, path: KeyPath, placed: tuple[Any, Origins], origin: Origin
) -> tuple[Any, Origins]:
    if not path:
        return placed
    key, rest = path[0], path[1:]
    if isinstance(tree, list):
        key = _position(tree, key, origin)
        below, inside = _put(tree[key], origins.at((key,)), rest, placed, origin)
        return [*tree[:key], below, *tree[key + 1 :]], origins.replaced(key, inside)
    tree = tree if isinstance(tree, dict) else {}
    below, inside = _put(tree.get(key), origins.at((key,)), rest, placed, origin)
    return {**tree, key: below}, origins.replaced(key, inside)


def _position(entries: list[Any], key: str | int, origin: Origin) -> int:
    if re.fullmatch("[0-9]{1,9}", str(key)) and int(key) < len(entries):
        return int(key)
    raise ConfigError(
        f"{shorten(str(key), 80)} is not a position in a list of {len(entries)}",
        where=str(origin),
        remedy=f"write a number from 0 to {len(entries) - 1}" if entries else "write the list in the file",
    )


def remove(document: Document, path: KeyPath) -> Document:
    """Return `document` without the key at `path`, which is in a mapping."""
    parent, above = document.get(path[:-1]), document.origins.at(path[:-1])
    rest = {key: value for key, value in parent.items() if key != path[-1]}
    return put(document, path[:-1], rest, above.without(path[-1]))


def move(document: Document, old: KeyPath, new: KeyPath) -> Document:
    """Return `document` with what was at `old` at `new`; the same where nothing is at `old`."""
    parent = document.get(old[:-1])
    if not isinstance(parent, dict) or old[-1] not in parent:
        return document
    return put(remove(document, old), new, parent[old[-1]], document.origins.at(old))


def merge(base: Document, over: Document) -> Document:
    """`base` with the values of `over`: mappings are merged key by key, everything else is replaced."""
    tree = _merge(base.tree, over.tree)
    return Document(tree, base.origins.merged(over.origins), base.notices + over.notices)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
