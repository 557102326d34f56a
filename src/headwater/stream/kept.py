"""Values in memory that replace the weight store for views that were taken before a parameter changed."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, eq=False)
class _Named:
    name: str


class KeptHome:
    """A home whose values are in memory; `read` returns that memory, not a copy.

    Attributes:
        spec: has the name of the parameter to which the values belonged.

    Args:
        values: the memory.
        name: the name of the parameter.
    """

    def __init__(self, values: torch.Tensor, name: str) -> None:
        self.spec = _Named(name)
        self._values = values

    def read(self) -> torch.Tensor:
        """Return the memory."""
        return self._values

    def write(self, value: torch.Tensor) -> None:
        """Replace the values."""
        if value is not self._values:
            self._values.copy_(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeptHome) and other._values is self._values

    def __hash__(self) -> int:
        return id(self._values)
