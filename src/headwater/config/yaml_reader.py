"""A strict YAML reader, with limits on size and depth so that no file takes long to read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from headwater.config.document import Document
from headwater.config.origins import Origin, Origins
from headwater.core.errors import ConfigError, shorten
from headwater.core.files import why_unreadable

MAX_BYTES = 128 * 1024
MAX_VALUES = 10_000
MAX_DEPTH = 50
"""Limits of a params file. The largest public one has 23 kB, 700 values and a depth of 12."""

_TOO_MANY = f"expected at most {MAX_VALUES:,} values, including those of aliases, found more"
_TAG = "tag:yaml.org,2002:"
_TAGS = frozenset(_TAG + name for name in ("str", "int", "float", "bool", "null", "seq", "map"))
_MERGE = _TAG + "merge"


def parse_yaml(text: str, source: str, kind: str = "params") -> Document:
    """Parse YAML text.

    Args:
        text: content of a file.
        source: name of the file, for errors.
        kind: kind of the file, for errors.

    Raises:
        ConfigError: if the text is not valid YAML, is too large or not a mapping, has a key that is not text,
            or has a key twice with different values.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            _check_size(node)
            tree = loader.construct_document(node) if node is not None else {}
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise _unreadable(error, source, kind) from None
    if not isinstance(tree, dict):
        first = "trainer" if kind == "params" else "description"
        raise ConfigError(
            f"expected a {kind} file to be a mapping of keys, got {type(tree).__name__}",
            where=source,
            remedy=f"start with the key `{first}:`",
        )
    # After the construction, which has replaced merges (`<<`) in the nodes by the keys that they add.
    origins = _origins(node, Origin(source, ())) if node is not None else Origins(Origin(source, ()))
    return Document(tree, origins, tuple(_repeated(source, mark, key) for mark, key in loader.repeated))


def parse_scalar(text: str) -> Any:
    """Parse a value on the command line as YAML (`1e-4`, `true`, `[a, b]`), or else return it as text."""
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            _check_size(node)
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError:
        return text


def read_document(path: Path, kind: str = "params") -> Document:
    """Read a YAML file.

    Args:
        path: the file.
        kind: kind of the file, for errors.

    Raises:
        ConfigError: if the file does not exist, or cannot be read or parsed.
    """
    try:
        with path.open("rb") as file:
            # One byte more than allowed: a file that is too large is noticed, and not read to its end.
            content = file.read(MAX_BYTES + 1)
        # A file that is too large may be cut within a character; its size is the error to report.
        text = content.decode("utf-8", errors="strict" if len(content) <= MAX_BYTES else "ignore")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the {kind} file cannot be read: {why_unreadable(error)}",
            where=str(path),
            remedy="save it in UTF-8" if isinstance(error, UnicodeDecodeError) else "check the path",
        ) from error
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"the {kind} file is larger than {MAX_BYTES // 1024} KiB",
            where=str(path),
            remedy=f"check the path: a {kind} file is a short text",
        )
    return parse_yaml(text, str(path), kind)


class _Loader(yaml.SafeLoader):
    """A loader of plain data: no dates, only the basic tags, and numbers as in YAML 1.2.

    Attributes:
        repeated: keys that occur twice in a mapping with the same value, with the place of the second one.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: list[tuple[yaml.Mark, str]] = []
        self._depth = self._count = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        self._count += 1
        if self._depth > MAX_DEPTH or self._count > 2 * MAX_VALUES:  # a key is a node too
            deep, many = f"values are nested deeper than {MAX_DEPTH}", _TOO_MANY
            mark: yaml.Mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, deep if self._depth > MAX_DEPTH else many, mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(node, yaml.MappingNode):
            # PyYAML itself would silently keep the last of two equal keys.
            self._check_keys(node)
        return node

    def _check_keys(self, node: yaml.MappingNode) -> None:
        """Drop keys repeated with the same value. Refuse other repeated keys, and keys that are not text."""
        seen: dict[str, yaml.Node] = {}
        kept = []
        for key, value in node.value:
            if key.tag == _MERGE:
                kept.append((key, value))
                continue
            name = _key_text(key)
            if name not in seen:
                seen[name] = value
                kept.append((key, value))
            elif _same_scalar(seen[name], value):
                self.repeated.append((key.start_mark, name))
            else:
                problem = f"the key {shorten(name, 80)} {_TWICE}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        node.value = kept

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag not in _TAGS and node.tag != _MERGE:
            problem = f"the tag {shorten(node.tag.replace(_TAG, '!!'), 80)} is not supported"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_object(node, deep=deep)


def _key_text(key: yaml.Node) -> str:
    if isinstance(key, yaml.ScalarNode) and key.tag == _TAG + "str":
        return str(key.value)
    shown = shorten(str(key.value), 80) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
    problem = f"expected text as a key, found {shown}; put it in quotes"
    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)


def _same_scalar(first: yaml.Node, second: yaml.Node) -> bool:
    both = isinstance(first, yaml.ScalarNode) and isinstance(second, yaml.ScalarNode)
    return both and (first.tag, first.value) == (second.tag, second.value)


def _checked(construct: Callable[[Any, yaml.ScalarNode], Any]) -> Callable[[_Loader, yaml.ScalarNode], Any]:
    """Wrap a constructor so that errors of Python's number parsers become errors of the file."""

    def checked(loader: _Loader, node: yaml.ScalarNode) -> Any:
        try:
            value = construct(loader, node)
        except (ValueError, LookupError, OverflowError):
            value = None
        # Larger numbers would overflow later, where they are used.
        if value is None or (isinstance(value, int) and abs(value) >= 2**63):
            shown = shorten(str(node.value), 40)
            problem = f"expected a number of at most 64 bits, or true or false, found {shown}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value

    return checked


def _integer(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """Return the integer of a node. YAML 1.1 reads 010 as 8, but users and YAML 1.2 read it as 10."""
    text = str(node.value)
    if re.fullmatch(r"[-+]?0[\d_]+", text):
        return int(text)
    return yaml.SafeLoader.yaml_constructors[_TAG + "int"](loader, node)


_CONSTRUCTORS = {**yaml.SafeLoader.yaml_constructors, _TAG + "int": _integer}
for _name in ("int", "float", "bool"):
    _Loader.add_constructor(_TAG + _name, _checked(_CONSTRUCTORS[_TAG + _name]))

# Read dates as text, because a folder may have a date as its name. Read 5:10 as text too: in YAML 1.1 it
# is the number 310 in base 60, but users and YAML 1.2 do not know such numbers.
_BASE_60 = (_TAG + "str", re.compile(r"[-+]?[\d_]+(:[\d_]+)+(\.[\d_]*)?$"))
_Loader.yaml_implicit_resolvers = {
    first: [_BASE_60, *((tag, pattern) for tag, pattern in resolvers if tag != _TAG + "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.1 reads 2e-4 as text, because it has no decimal point. Users and YAML 1.2 expect a number.
_Loader.add_implicit_resolver(
    _TAG + "float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
# YAML 1.1 reads 09 as text, because 9 is not an octal digit.
_Loader.add_implicit_resolver(_TAG + "int", re.compile(r"[-+]?0\d[\d_]*$"), list("-+0"))


def _check_size(node: yaml.Node | None) -> None:
    """Raise if there are too many values, including those of aliases, or a value contains itself."""
    sizes: dict[int, int] = {}
    if node is not None and _size(node, sizes, set()) > MAX_VALUES:
        raise yaml.composer.ComposerError(None, None, _TOO_MANY, node.start_mark)


def _size(node: yaml.Node, sizes: dict[int, int], above: set[int]) -> int:
    if id(node) in above:
        raise yaml.composer.ComposerError(None, None, "a value contains itself", node.start_mark)
    if id(node) not in sizes:
        above.add(id(node))
        sizes[id(node)] = 1 + sum(_size(child, sizes, above) for child in _children(node))
        above.remove(id(node))
    return sizes[id(node)]


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [value for _, value in node.value]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _origins(node: yaml.Node, origin: Origin) -> Origins:
    items: list[tuple[str | int, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        items = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        items = [(index, value, value) for index, value in enumerate(node.value)]
    inside = {
        key: _origins(value, Origin(origin.source, (*origin.key, key), mark.start_mark.line + 1))
        for key, mark, value in items
    }
    return Origins(origin, inside)


def _repeated(source: str, mark: yaml.Mark, key: str) -> str:
    return f"{source}, line {mark.line + 1}: {shorten(key, 80)} occurs twice, with the same value"


def _unreadable(error: yaml.YAMLError, source: str, kind: str) -> ConfigError:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    if isinstance(error, yaml.reader.ReaderError):
        what = f"{what}: U+{error.character:04X} at position {error.position}"
    return ConfigError(
        f"the {kind} file cannot be parsed: {what}",
        where=str(Origin(source, (), mark.line + 1 if mark else None)),
        remedy=next((remedy for part, remedy in _REMEDIES.items() if part in what), _USUAL_REMEDY),
    )


_TWICE = "occurs twice in one mapping, with different values"
_USUAL_REMEDY = "check quotes, colons and indentation there"
_REMEDIES = {
    _TWICE: "remove one of the two",
    "'\\t'": "indent with spaces instead of tabs",
    "special characters": "remove the character",
}
"""Part of a problem -> the remedy."""
