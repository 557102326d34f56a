"""Records of single Python objects. Each can tell whether its object has changed, and put it back."""

from __future__ import annotations

import abc
import array
import io
import itertools
import operator
import os
import warnings
from collections import deque
from contextvars import ContextVar
from types import CellType, FunctionType, GeneratorType, MemberDescriptorType, ModuleType
from typing import Any, final

import numpy as np
import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter

from headwater.core.containers import Items, has_items, items_of, restore
from headwater.core.random_states import set_state, state_of
from headwater.core.tensor_values import copies_of, put_back


class Record(abc.ABC):
    """Interface: the state of one object at one moment."""

    __slots__ = ()

    @abc.abstractmethod
    def is_present(self) -> bool:
        """True if the object still has this state."""

    @abc.abstractmethod
    def put_back(self) -> None:
        """Give the object this state again."""

    @abc.abstractmethod
    def again(self) -> Record:
        """Return a record of the object's present state."""


@final
class OfContainer(Record):
    """The items of a list, dictionary, set or deque. The attributes of an object are a dictionary too."""

    __slots__ = ("container", "items")

    def __init__(self, container: Any) -> None:
        self.container, self.items = container, items_of(container)

    def is_present(self) -> bool:
        return has_items(self.container, self.items)

    def put_back(self) -> None:
        restore(self.container, self.items)

    def again(self) -> Record:
        return OfContainer(self.container)


@final
class OfRegistry(Record):
    """The items of a dictionary that belongs to a class or a Python module, not to one object.

    Definitions that were added stay: functions without enclosing variables, classes and Python modules.
    They hold nothing of the forward that added them, and code that registers them often does so only once.
    """

    __slots__ = ("_registry", "items")

    def __init__(self, registry: dict[Any, Any]) -> None:
        self._registry = registry
        self.items: Any = items_of(registry)

    def is_present(self) -> bool:
        return has_items(self._registry, self.items)

    def put_back(self) -> None:
        now = items_of(self._registry)
        assert isinstance(now, dict)
        added = {name: now[name] for name in now if name not in self.items and _is_definition(now[name])}
        restore(self._registry, self.items | added)

    def again(self) -> Record:
        return OfRegistry(self._registry)


@final
class OfCell(Record):
    """The variable of an enclosing function.

    Raises:
        ValueError: if the variable has no value.
    """

    __slots__ = ("_cell", "content")

    def __init__(self, cell: CellType) -> None:
        self._cell, self.content = cell, cell.cell_contents

    def is_present(self) -> bool:
        return self._cell.cell_contents is self.content

    def put_back(self) -> None:
        self._cell.cell_contents = self.content

    def again(self) -> Record:
        return OfCell(self._cell)


@final
class OfVariables(Record):
    """Some variables of a Python module. Its other variables may change."""

    __slots__ = ("_space", "values")

    def __init__(self, space: dict[str, Any], names: Any) -> None:
        self._space = space
        self.values = {name: space[name] for name in names if name in space}

    @property
    def module(self) -> str | None:
        """The name of the Python module."""
        return self._space.get("__name__")

    def is_present(self) -> bool:
        return all(name in self._space and self._space[name] is value for name, value in self.values.items())

    def put_back(self) -> None:
        put_changed(self._space, self.values)

    def again(self) -> Record:
        return OfVariables(self._space, self.values)


@final
class OfSlot(Record):
    """The attribute of an object that is in a slot (`__slots__`) of its class, which may be empty."""

    __slots__ = ("_object", "_slot", "content")

    def __init__(self, slot: MemberDescriptorType, value: Any) -> None:
        self._slot, self._object = slot, value
        self.content = self._present()

    def _present(self) -> object:
        # A property or `__getattr__` of the object is not called.
        try:
            content: object = self._slot.__get__(self._object)
        except AttributeError:
            return _EMPTY
        return content

    def is_present(self) -> bool:
        return self._present() is self.content

    def put_back(self) -> None:
        if self.is_present():
            return
        if self.content is _EMPTY:
            self._slot.__delete__(self._object)
        else:
            self._slot.__set__(self._object, self.content)  # works for a frozen dataclass too

    def again(self) -> Record:
        return OfSlot(self._slot, self._object)


@final
class OfClass(Record):
    """The attributes of a class including its methods, without those that Python adds, such as `__doc__`.

    Args:
        cls: the class.
        name: the only attribute to record; by default all.
    """

    __slots__ = ("_class", "_name", "attributes")

    def __init__(self, cls: type, name: str | None = None) -> None:
        self._class, self._name = cls, name
        self.attributes = self._present()

    def _present(self) -> dict[str, Any]:
        attributes = vars(self._class)
        if self._name is not None:
            return {self._name: attributes[self._name]} if self._name in attributes else {}
        return {name: value for name, value in attributes.items() if not name[:2] == name[-2:] == "__"}

    def is_present(self) -> bool:
        return has_items(self._present(), self.attributes)

    def put_back(self) -> None:
        now = self._present()
        # By Python's own class: a metaclass may refuse changes.
        for name in now.keys() - self.attributes.keys():
            type.__delattr__(self._class, name)
        for name, value in self.attributes.items():
            if now.get(name, _EMPTY) is not value:
                type.__setattr__(self._class, name, value)

    def again(self) -> Record:
        return OfClass(self._class, self._name)


@final
class OfArray(Record):
    """The values of a numpy array."""

    __slots__ = ("_array", "_values")

    def __init__(self, array: Any) -> None:
        self._array, self._values = array, array.copy()

    def is_present(self) -> bool:
        # As bytes: NaN equals no other value.
        same_shape = bool(self._array.shape == self._values.shape)
        return same_shape and self._array.tobytes() == self._values.tobytes()

    def put_back(self) -> None:
        # The values of an array that was resized in place are lost.
        if self._array.shape == self._values.shape and not self.is_present():
            np.copyto(self._array, self._values)

    def again(self) -> Record:
        return OfArray(self._array)


BYTES = (bytearray, array.array)
"""Classes of Python's own arrays."""


@final
class OfBytes(Record):
    """The content of an array of Python's own classes."""

    __slots__ = ("_array", "_content")

    def __init__(self, content: bytearray | array.array[Any]) -> None:
        self._array: Any = content
        self._content: Any = content[:]

    def is_present(self) -> bool:
        return bytes(self._array) == bytes(self._content)

    def put_back(self) -> None:
        if not self.is_present():
            self._array[:] = self._content

    def again(self) -> Record:
        return OfBytes(self._array)


@final
class OfTensor(Record):
    """The values of a tensor."""

    __slots__ = ("_tensor", "_values")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._values = copies_of([tensor])

    def is_present(self) -> bool:
        return all(torch.equal(tensor, value) for tensor, value in self._values)

    def put_back(self) -> None:
        put_back(self._values)

    def again(self) -> Record:
        return OfTensor(self._tensor)


@final
class OfBuffer(Record):
    """The content and the position of a file in memory (`BytesIO`, `StringIO`), which may be closed."""

    __slots__ = ("_buffer", "_state")

    def __init__(self, buffer: io.BytesIO | io.StringIO) -> None:
        self._buffer: Any = buffer
        self._state = self._present()

    def _present(self) -> tuple[Any, int] | None:
        return None if self._buffer.closed else (self._buffer.getvalue(), self._buffer.tell())

    def is_present(self) -> bool:
        return self._present() == self._state

    def put_back(self) -> None:
        # A file that was closed cannot be opened again.
        if self._state is not None and not self._buffer.closed and not self.is_present():
            content, position = self._state
            self._buffer.seek(0)
            self._buffer.truncate()
            self._buffer.write(content)
            self._buffer.seek(position)

    def again(self) -> Record:
        return OfBuffer(self._buffer)


@final
class OfContextVariable(Record):
    """The value of a context variable in the present context."""

    __slots__ = ("_variable", "content")

    def __init__(self, variable: ContextVar[Any]) -> None:
        self._variable = variable
        self.content = self._present()

    def _present(self) -> Any:
        try:
            return self._variable.get()  # an argument would replace the variable's default
        except LookupError:
            return _EMPTY

    def is_present(self) -> bool:
        return self._present() is self.content

    def put_back(self) -> None:
        # A variable without a default cannot lose the value that it has got.
        if self.content is not _EMPTY and not self.is_present():
            self._variable.set(self.content)

    def again(self) -> Record:
        return OfContextVariable(self._variable)


@final
class OfEnvironment(Record):
    """The environment variables of this process."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values = dict(os.environ)

    def is_present(self) -> bool:
        return os.environ == self._values

    def put_back(self) -> None:
        if not self.is_present():
            for name in os.environ.keys() - self._values.keys():
                del os.environ[name]
            os.environ.update(self._values)

    def again(self) -> Record:
        return OfEnvironment()


@final
class OfGenerator(Record):
    """The state of a random generator."""

    __slots__ = ("_generator", "_state")

    def __init__(self, generator: Any) -> None:
        self._generator, self._state = generator, state_of(generator)

    def is_present(self) -> bool:
        return bool(state_of(self._generator) == self._state)

    def put_back(self) -> None:
        if not self.is_present():
            set_state(self._generator, self._state)

    def again(self) -> Record:
        return OfGenerator(self._generator)


_REWINDABLE: tuple[type, ...] = (
    *(type(iter([])), type(iter(())), type(iter("")), type(iter(b"")), type(iter(bytearray()))),
    *(type(iter(array.array("b"))), type(reversed([])), reversed),
)

_COUNTED: tuple[type, ...] = (
    *(type(iter({})), type(iter({}.values())), type(iter({}.items())), type(iter(set()))),
    *(type(reversed({})), type(reversed({}.values())), type(reversed({}.items()))),
    *(type(iter(deque())), type(reversed(deque()))),
)
"""The classes of iterators that tell only how many items are left."""

ITERATORS: tuple[type, ...] = (
    *(*_REWINDABLE, *_COUNTED, _BaseDataLoaderIter),
    type(iter(range(0))),
    *(GeneratorType, enumerate, filter, map, zip),
    *(itertools.chain, itertools.count, itertools.cycle, itertools.islice, itertools.repeat),
)
"""The classes of iterators of Python and torch whose position can be read."""


@final
class OfIterator(Record):
    """The position of an iterator. Only iterators over lists, tuples, strings and arrays can go back."""

    __slots__ = ("_position", "iterator")

    def __init__(self, iterator: Any) -> None:
        self.iterator: Any = iterator
        self._position = _position_of(iterator)

    def is_present(self) -> bool:
        return bool(_position_of(self.iterator) == self._position)

    def put_back(self) -> None:
        if type(self.iterator) in _REWINDABLE and not self.is_present():
            *_, index = self._position
            if isinstance(index, int):  # else it was at its end
                self.iterator.__setstate__(index)

    def again(self) -> Record:
        return OfIterator(self.iterator)


def _position_of(value: Any) -> Any:
    """Return a value that changes when an iterator advances."""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        return frame and (frame.f_lasti, [_Same(variable) for variable in frame.f_locals.values()])
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, _COUNTED):
        return operator.length_hint(value)
    if isinstance(value, _BaseDataLoaderIter):
        return value._num_yielded
    if isinstance(value, ITERATORS):
        with warnings.catch_warnings():  # Python 3.12 warns that `itertools` will lose `__reduce__`
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                return _position_of(value.__reduce__())
            except TypeError:  # iterators of `itertools` in Python 3.14
                return None
    if isinstance(value, tuple):
        return tuple(map(_position_of, value))
    is_end = isinstance(value, list) and not value  # an iterator at its end makes a new list
    return value if isinstance(value, int | range) or is_end else _Same(value)


@final
class _Same:
    """A reference that equals only references to the same object."""

    __slots__ = ("_value",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value


_EMPTY = object()
"""A mark that stands for an attribute without a value."""


def put_changed(space: dict[str, Any], before: Items) -> None:
    """Set the items of a dictionary that differ from those before. Other items stay."""
    assert isinstance(before, dict)
    for name, value in before.items():
        if name not in space or space[name] is not value:
            space[name] = value


def _is_definition(value: Any) -> bool:
    if isinstance(value, FunctionType):
        return value.__closure__ is None
    return isinstance(value, type | ModuleType)
