"""A base class for mappings that are instances of `dict`, but keep their entries elsewhere."""

from __future__ import annotations

import abc
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Base = MutableMapping[Any, Any]
else:
    # The order matters: methods of `dict` would read its own storage, which is empty.
    class _Base(MutableMapping, dict):
        """A mapping for which `isinstance(mapping, dict)` is true."""


class Dictionary(_Base):
    """A mapping that behaves as a `dict`. The storage of the `dict` itself stays empty.

    Reading a missing key with `mapping[key]` may create it, as in a `defaultdict`. `get`, `pop` and
    `setdefault` do not create it.
    """

    @abc.abstractmethod
    def copy(self) -> dict[Any, Any]:
        """Return an ordinary dictionary with the entries that the mapping has now."""

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:
            if default:
                return default[0]
            raise KeyError(key)
        value = self[key]
        del self[key]
        return value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def clear(self) -> None:
        for key in list(self):
            del self[key]

    def __or__(self, other: Any) -> Any:
        return self.copy() | dict(other)

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __reversed__(self) -> Iterator[Any]:
        return iter([*self][::-1])

    def __repr__(self) -> str:
        return repr(self.copy())
