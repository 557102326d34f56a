"""A params file as read: nested plain data, and for each key the file, line and spelling it came from."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from headwater.core.errors import ConfigError

KeyPath = tuple[str | int, ...]
"""Keys and list positions from the top of a document down to a value."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a value was written.

    Attributes:
        source: the file, or `command line`.
        key: the key as it was written there.
        line: line in the file, from 1; `None` where it has none.
    """

    source: str
    key: KeyPath
    line: int | None = None

    def below(self, rest: KeyPath) -> Origin:
        """The place of a key under this one."""
        return dataclasses.replace(self, key=self.key + rest)

    def __str__(self) -> str:
        line = f", line {self.line}" if self.line else ""
        return f"{self.source}{line}" + (f": {dotted(self.key)}" if self.key else "")


@dataclasses.dataclass(frozen=True)
class Document:
    """Nested mappings, lists and scalars with their origins. Functions make new ones, none changes one.

    Attributes:
        tree: the values.
        origins: where each was written, by path.
        notices: what to tell the user about keys that are no longer in `tree`.
    """

    tree: dict[str, Any]
    origins: dict[KeyPath, Origin]
    notices: tuple[str, ...] = ()

    def origin(self, path: KeyPath) -> Origin:
        """Where the value at `path` was written, or would be: told by its nearest recorded ancestor."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]].below(path[length:])
        return Origin("params", path)

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

    def below(self, path: KeyPath) -> dict[KeyPath, Origin]:
        """The origins at and under `path`, by what is left of their path."""
        size = len(path)
        return {key[size:]: origin for key, origin in self.origins.items() if key[:size] == path}


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


def dotted(path: KeyPath) -> str:
    """`path` as people write it: `trainer.init.callbacks[0].ComputeNorm`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def put(document: Document, path: KeyPath, value: Any, origins: dict[KeyPath, Origin]) -> Document:
    """`document` with `value` at `path`; mappings on the way are made, lists must reach so far.

    Args:
        origins: where the value and what is in it were written, by path below `path`.

    Raises:
        ConfigError: if the path leads through a list that has no such position.
    """
    kept = {key: origin for key, origin in document.origins.items() if key[: len(path)] != path}
    placed = {path + rest: origin for rest, origin in origins.items()}
    tree = _put(document.tree, path, value, document.origin(path))
    return Document(tree, kept | placed, document.notices)


def _put(tree: Any, path: KeyPath, value: Any, origin: Origin) -> Any:
    if not path:
        return value
    key, rest = path[0], path[1:]
    if not isinstance(tree, list):
        tree = tree if isinstance(tree, dict) else {}
        return {**tree, key: _put(tree.get(key), rest, value, origin)}
    if not str(key).isdigit() or int(key) >= len(tree):
        raise ConfigError(
            f"{key} is not a position in a list of {len(tree)}",
            where=str(origin),
            remedy=f"write a number from 0 to {len(tree) - 1}",
        )
    index = int(key)
    return [*tree[:index], _put(tree[index], rest, value, origin), *tree[index + 1 :]]


def merge(base: Document, over: Document) -> Document:
    """`base` with the values of `over`: mappings are merged key by key, everything else is replaced."""
    tree = _merge(base.tree, over.tree)
    return Document(tree, base.origins | over.origins, base.notices + over.notices)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def parse_yaml(text: str, source: str, kind: str = "params") -> Document:
    """The document in `text`, a file of a kind that messages name.

    Raises:
        ConfigError: if it is not YAML, not a mapping, repeats a key, or has a key that is not text.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        tree = loader.construct_document(node) if node is not None else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            f"the {kind} file cannot be parsed: {what}",
            where=str(Origin(source, (), mark.line + 1 if mark else None)),
            remedy="correct the line",
        ) from error
    finally:
        loader.dispose()
    if not isinstance(tree, dict):
        first = "trainer" if kind == "params" else "description"
        raise ConfigError(f"a {kind} file is a mapping of keys", where=source, remedy=f"write `{first}:`")
    return Document(tree, dict(_origins(node, source, (), ())) if node is not None else {})


def parse_scalar(text: str) -> Any:
    """The YAML value that `text` means on a command line: a number, `true`, `[a, b]`, else the text."""
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    except yaml.YAMLError:
        return text
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """Plain data only, with repeated keys refused and numbers read as YAML 1.2 reads them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge":
                self._check_key(key, seen)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    @staticmethod
    def _check_key(key: yaml.Node, seen: set[str]) -> None:
        if key.tag != "tag:yaml.org,2002:str":
            problem = f"the key {key.value} is not text: put it in quotes"
        elif key.value in seen:
            problem = f"the key {key.value} is there twice in one mapping"
        else:
            return
        raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)


# YAML 1.1 reads 2e-4 as text, because it lacks a point; YAML 1.2 and everyone who writes it means a number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _origins(
    node: yaml.Node, source: str, path: KeyPath, parents: tuple[int, ...]
) -> Iterator[tuple[KeyPath, Origin]]:
    if id(node) in parents:
        raise ConfigError(
            "a value contains itself", where=str(Origin(source, path)), remedy="remove the alias"
        )
    parents = (*parents, id(node))
    items: list[tuple[str | int, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        items = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        items = [(index, value, value) for index, value in enumerate(node.value)]
    if not path:
        yield (), Origin(source, ())
    for key, mark, value in items:
        here = (*path, key)
        yield here, Origin(source, here, mark.start_mark.line + 1)
        yield from _origins(value, source, here, parents)


def read_document(path: Path, kind: str = "params") -> Document:
    """The document in the file at `path`, which is of a kind that messages name.

    Raises:
        ConfigError: if there is no such file, or it cannot be read or parsed.
    """
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path), kind)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the {kind} file cannot be read: {error}", where=str(path), remedy="check the path"
        ) from error
