"""The memory to which a parameter points. Tensors at rest that are views of the parameter share it.

[Note: other memory]
`p.data = other` makes `p` point to other memory. Views that were taken of `p` before keep the former memory
and its values. So all tensors at rest that are views of a parameter share one `Memory`. It reads and writes
the store until the parameter gets other memory. Then it copies the values to `kept`, if a tensor at rest
still needs them. If such a tensor is assigned to `p.data` again, its `Memory` returns to the store.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, final

import torch


@dataclasses.dataclass(frozen=True, eq=False)
class _Named:
    name: str


@final
class KeptHome:
    """The place of values that have left the store and are in memory. `read` returns that memory, not a copy.

    Attributes:
        spec: has the name of the parameter to which the values belonged.

    Args:
        values: the memory.
        name: the name of the parameter.
    """

    def __init__(self, values: torch.Tensor, name: str) -> None:
        self.spec = _Named(name)
        self._values = values

    @property
    def version(self) -> object:
        """The version of the values. It compares unequal once they have changed."""
        return self, self._values._version

    def read(self) -> torch.Tensor:
        """Return the values: the memory itself, not a copy."""
        return self._values

    def write(self, value: torch.Tensor) -> None:
        """Overwrite the memory with `value`."""
        if value is not self._values:
            self._values.copy_(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeptHome) and other._values is self._values

    def __hash__(self) -> int:
        return id(self._values)


@final
class Memory:
    """The memory to which a parameter points, in the store or outside. Views of the parameter share it.

    See [Note: other memory].

    Attributes:
        param: the parameter.
        kept: the values, if they are no longer the parameter's values in the store; else `None`.
    """

    def __init__(self, param: torch.Tensor) -> None:
        self.param: Any = param
        self.kept: torch.Tensor | None = None

    @classmethod
    def of(cls, param: torch.Tensor) -> Memory:
        """Return the memory to which a parameter points now."""
        # Views of one parameter must share one object, so that all of them follow it.
        return _memories.setdefault(id(param), cls(param))

    @property
    def tensor_name(self) -> tuple[torch.Tensor, None]:
        """The parameter, and `None`: these are not values of optimizer state."""
        return self.param, None

    @property
    def home(self) -> Any:
        if self.kept is None and hasattr(self.param, "home"):
            return self.param.home
        return KeptHome(self.param.data if self.kept is None else self.kept, "parameter")


_memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
"""Identity of a parameter -> its present memory, if a tensor at rest is a view of it."""


def leave_memory(param: Any) -> None:
    """Prepare `param` for other memory: copy its values from the store for views of the present memory."""
    memory = _memories.pop(id(param), None)
    if memory is not None and memory.kept is None:
        # The old values are copied before the new ones are written, because former views keep them.
        memory.kept = param.home.read()


def return_to_memory(memory: Memory) -> None:
    """Make `memory` the present memory of its parameter again; see [Note: other memory].

    Before this call the values of `memory` must be written to the store, where its views read from now on.
    """
    memory.kept = None
    _memories[id(memory.param)] = memory


def leave_store(param: torch.Tensor) -> None:
    """Make views of a parameter that are at rest share its memory: the parameter is a plain one now."""
    memory = _memories.get(id(param))
    if memory is not None:
        memory.kept = param.data


def enter_store(param: torch.Tensor) -> None:
    """Make views of a parameter that are at rest use the store: the parameter is streamed now."""
    memory = _memories.get(id(param))
    if memory is None or memory.kept is None:
        return
    if memory.kept.data_ptr() == param.data_ptr() and memory.kept.shape == param.shape:
        memory.kept = None
    else:
        del _memories[id(param)]


def present_memory(param: torch.Tensor) -> Memory | None:
    """Return the present memory of a parameter if a tensor at rest shares it; else `None`."""
    return _memories.get(id(param))
