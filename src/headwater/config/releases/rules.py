"""Rules that convert a key of an older release to the keys of this release."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, final

from headwater.config.document import Document, move, no_effect, put, remove
from headwater.config.origins import KeyPath, dotted
from headwater.core.errors import ConfigError


class Rule(abc.ABC):
    """A rule by which a key of an older release is converted."""

    @abc.abstractmethod
    def apply(self, document: Document, path: KeyPath) -> Document:
        """Return `document` with the key at `path` replaced by its equivalent."""


Rules = Mapping[str, Rule]


@final
@dataclasses.dataclass(frozen=True)
class Renamed(Rule):
    """A rule for a key that has another name now, in the same section or in another one.

    Attributes:
        name: the new key of the same section, or a path from the top of the file.
    """

    name: str | KeyPath

    def apply(self, document: Document, path: KeyPath) -> Document:
        new = (*path[:-1], self.name) if isinstance(self.name, str) else self.name
        _check_free(document, path, new)
        return move(document, path, new)


@final
@dataclasses.dataclass(frozen=True)
class Ignored(Rule):
    """A rule for a key that has no effect.

    Attributes:
        why: the reason, a clause for the notice.
        only: the values that have no effect; any other value is an error. Empty for all values.
    """

    why: str
    only: tuple[Any, ...] = ()

    def apply(self, document: Document, path: KeyPath) -> Document:
        _check_value(document, path, self.only)
        origin = document.origin(path)
        return remove(document, path).with_notice(no_effect(origin, self.why))


@final
@dataclasses.dataclass(frozen=True)
class IgnoredWhere(Rule):
    """A rule for a key that has no effect if it has certain values. With other values it stays unchanged.

    Attributes:
        reasons: for each value without effect, the reason, a clause for the notice.
    """

    reasons: Mapping[str, str]

    def apply(self, document: Document, path: KeyPath) -> Document:
        value = document.get(path)
        if not isinstance(value, str) or value not in self.reasons:
            return document
        return Ignored(self.reasons[value]).apply(document, path)


@final
@dataclasses.dataclass(frozen=True)
class Replaced(Rule):
    """A rule for a key that is replaced. Each of its values means a value of another key, or the default.

    Attributes:
        meanings: new key and value, by old value; `None` if the old value is the default.
    """

    meanings: Mapping[Any, tuple[str | KeyPath, Any] | None]

    def apply(self, document: Document, path: KeyPath) -> Document:
        _check_value(document, path, tuple(self.meanings))
        meaning, origin = self.meanings[document.get(path)], document.origin(path)
        if meaning is None:
            return remove(document, path)
        key, value = meaning
        new = (*path[:-1], key) if isinstance(key, str) else key
        if document.get(new) != value:
            _check_free(document, path, new)
        return put(remove(document, path), new, value, origin)


def apply_rules(document: Document, section: KeyPath, rules: Rules) -> Document:
    """Return `document` with the rules applied to the keys of a section.

    Args:
        document: the document.
        section: path of the section.
        rules: rules by key; keys without a rule are kept.

    Raises:
        ConfigError: if a key has a value that this release does not support, or contradicts another key.
    """
    keys = document.get(section)
    for key in list(keys) if isinstance(keys, dict) else []:
        if key in rules:
            document = rules[key].apply(document, (*section, key))
    return document


def _check_free(document: Document, old: KeyPath, new: KeyPath) -> None:
    parent = document.get(new[:-1])
    if isinstance(parent, dict) and new[-1] in parent and parent[new[-1]] != document.get(old):
        raise ConfigError(
            f"{dotted(old)} and {dotted(new)} have the same meaning, but different values",
            where=f"{document.origin(old)} and {document.origin(new)}",
            remedy=f"remove {old[-1]}",
        )


def _check_value(document: Document, path: KeyPath, allowed: tuple[Any, ...]) -> None:
    value = document.get(path)
    # With the type: 1 equals True in Python, but it is not what the file says.
    if not allowed or any(value is each or (type(value) is type(each) and value == each) for each in allowed):
        return
    expected = " or ".join(_yaml(each) for each in allowed)
    raise ConfigError(
        f"expected {path[-1]}: {expected}, found {_yaml(value)}, which is not supported",
        where=str(document.origin(path)),
        remedy=f"write {path[-1]}: {_yaml(allowed[0])}, or remove the key",
    )


def _yaml(value: Any) -> str:
    """Return a value as YAML text."""
    names = {True: "true", False: "false", None: "null"}
    return names[value] if value is None or isinstance(value, bool) else repr(value)
