"""The place where each value of a params file was written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from headwater.core.errors import shorten

KeyPath = tuple[str | int, ...]
"""Keys and list positions from the top of a document down to a value."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """The place where a value was written.

    Attributes:
        source: the file, or `command line`.
        key: the key as it was written there.
        line: line in the file, from 1; `None` if the place is not a line.
    """

    source: str
    key: KeyPath
    line: int | None = None

    def below(self, rest: KeyPath) -> Origin:
        """Return the origin of the value at `rest`, a path below the key of this origin."""
        return dataclasses.replace(self, key=self.key + rest) if rest else self

    def __str__(self) -> str:
        line = f", line {self.line}" if self.line else ""
        return f"{self.source}{line}" + (f": {shorten(dotted(self.key), 200)}" if self.key else "")


@dataclasses.dataclass(frozen=True)
class Origins:
    """The origins of a value and of all values inside it, as a tree of the same shape.

    Attributes:
        here: origin of the value itself; `None` if it is not recorded.
        inside: origins of the values in it, by key or position.
    """

    here: Origin | None = None
    inside: Mapping[str | int, Origins] = dataclasses.field(default_factory=dict)

    def at(self, path: KeyPath) -> Origins:
        """Return the origins of the value at `path` and of all values inside that value."""
        found = self
        for key in path:
            if key not in found.inside:
                return NOWHERE
            found = found.inside[key]
        return found

    def nearest(self, path: KeyPath) -> Origin:
        """Return the origin of the value at `path`; if it is not recorded, derive it from an ancestor's."""
        best = (self.here or Origin("params", ())).below(path)
        found = self
        for depth, key in enumerate(path, 1):
            if key not in found.inside:
                break
            found = found.inside[key]
            if found.here is not None:
                best = found.here.below(path[depth:])
        return best

    def replaced(self, key: str | int, origins: Origins) -> Origins:
        """Return a copy in which the value at `key` has the given origins."""
        return Origins(self.here, {**self.inside, key: origins})

    def without(self, key: str | int) -> Origins:
        """Return a copy without the origins of the value at `key`."""
        return Origins(self.here, {name: each for name, each in self.inside.items() if name != key})

    def merged(self, over: Origins) -> Origins:
        """Return the union of these origins and those of `over`, which take precedence."""
        inside = dict(self.inside)
        for key, origins in over.inside.items():
            inside[key] = inside[key].merged(origins) if key in inside else origins
        return Origins(over.here or self.here, inside)


NOWHERE = Origins()


def dotted(path: KeyPath) -> str:
    """Return `path` as people write it: `trainer.init.callbacks[0].ComputeNorm`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")
