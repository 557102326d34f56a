"""Visits the Python objects that a model's functions and modules reach, to undo changes to them."""

from __future__ import annotations

import functools
import io
import os
import sys
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import (
    BuiltinMethodType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.quasirandom import SobolEngine

from headwater.core.containers import CONTAINERS, FIXED, Items, has_items, items_of
from headwater.core.foreign import HOLDERS, is_foreign, is_of_foreign, slots_of
from headwater.core.python_records import (
    BYTES,
    ITERATORS,
    OfArray,
    OfBuffer,
    OfBytes,
    OfCell,
    OfClass,
    OfContainer,
    OfContextVariable,
    OfEnvironment,
    OfGenerator,
    OfIterator,
    OfRegistry,
    OfSlot,
    OfTensor,
    OfVariables,
    Record,
    put_changed,
)
from headwater.core.python_state import PythonState, undone
from headwater.core.random_states import DEFAULTS, GENERATORS
from headwater.core.tensor_values import may_change
from headwater.core.user_functions import (
    HOOKS,
    functions_of,
    functions_of_attribute,
    is_followed,
    is_of_library,
    names_of,
)

_DEEPEST = 4
"""Maximum references to follow from a function: to a cell, an object, its dictionary, a list in it."""

_DEEPEST_IN_LIBRARY = 1
"""Maximum references to follow from an attribute of a module, if it is an object of an installed library."""

_LARGEST = 1000
"""The items of larger containers are not visited."""

_LARGEST_ARRAY_BYTES = 1 << 20
"""The values of larger numpy arrays are not recorded."""

_LARGEST_TENSOR_BYTES = 1 << 16
"""The values of larger tensors are not recorded: a forward may reach a whole data set."""

_LARGEST_COPIED_ONCE = 1 << 26
"""A dry run also copies tensors up to this size, since it happens once for each plan."""

_WITHOUT_PARTS = (torch.Tensor, np.ndarray, io.BytesIO, io.StringIO, type(os.environ), *BYTES, *GENERATORS)
"""Classes of objects that are recorded as a whole."""

_CACHED: tuple[type, ...] = (type(functools.lru_cache(len)),)
"""The class of functions whose results `functools` caches."""

_HOLDERS = (
    *(*HOLDERS, ChainMap),
    *(weakref.WeakKeyDictionary, weakref.WeakSet, weakref.WeakValueDictionary, SobolEngine),
)
"""Classes of Python and torch whose objects have their state in attributes."""

_PARTS_OF_CODE = (FunctionType, MethodType, functools.partial, *CONTAINERS, *FIXED)
"""Python's own classes whose objects count as parts of the user's code."""

_STATE_OF_TORCH = (
    *("_parameters", "_buffers", "_modules", *HOOKS),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
)
"""The dictionaries of a module whose items belong to its state, beside its own attributes."""

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"} | {"_call_impl", "_compiled_call_impl"}
"""The attributes of a module that torch makes, and those that replace its call."""

_WITHOUT_STATE = frozenset(
    {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size}
)
"""Classes of values that refer to no other objects. They are skipped, as most attributes have them."""

_slots_of_class = functools.lru_cache(maxsize=4096)(slots_of)


@contextmanager
def effects_undone(model: nn.Module, arguments: Sequence[Any] = ()) -> Iterator[None]:
    """Enter a context. At its end, restore all Python objects that a model's forward and hooks can reach.

    Changes of tensors of more than 64 MiB, of numpy arrays of more than 1 MiB, files and anything outside of
    Python's objects stay.

    Args:
        model: the model.
        arguments: functions and modules that the caller passes to the model.

    Raises:
        StreamError: if an iterator has advanced that cannot go back.
    """
    before = state_of_model(model, arguments)
    with undone(before, _LARGEST_COPIED_ONCE):
        yield
    before.refuse_advanced_iterators()


def state_of_model(model: nn.Module, arguments: Sequence[Any] = ()) -> PythonState:
    """Return the state of a model's modules, and of all objects that their hooks and forwards reach.

    Args:
        model: the model.
        arguments: functions and modules that the caller passes to the model.
    """
    visitor = _Visitor()
    visitor.visit_model(model)
    functions = [*functions_of(model), *arguments]
    for function in functions:
        visitor.visit(function, _DEEPEST)
    if functions:  # torch's own modules draw from torch's generator only
        visitor.state.records += map(OfGenerator, DEFAULTS)
    return visitor.visited()


def state_of_methods(cls: type, others: Iterable[Any] = ()) -> PythonState:
    """Return the state of all objects that the methods of a class, or other objects, reach.

    Args:
        cls: the class. Methods of torch's and Python's classes among its bases are left out.
        others: objects that the methods use, such as arguments of the constructor.
    """
    visitor = _Visitor()
    visitor.visit(cls, _DEEPEST)
    for base in cls.__mro__:
        for attribute in vars(base).values():
            for method in functions_of_attribute(attribute):
                visitor.visit(method, _DEEPEST)
    for value in others:
        visitor.visit(value, _DEEPEST)
    return visitor.visited()


@final
class _Visitor:
    """Visits objects, and all objects that they refer to.

    Objects that are fewer references away are visited first. So of several ways to an object the shortest one
    counts, which leaves the most references to follow from it.

    Attributes:
        state: the state of the objects that were visited.
    """

    def __init__(self) -> None:
        self.state = PythonState()
        self._seen: dict[int, object] = {}  # keeps them alive, so that an identity means one object
        self._waiting: list[list[Any]] = [[] for _ in range(_DEEPEST + 2)]  # by references left to follow
        self._named: set[str] = set()
        self._unnamed: dict[str, list[tuple[FunctionType, int]]] = {}

    def visit_model(self, model: nn.Module) -> None:
        """Record the state of all modules of a model."""
        # The layers of torch call these functions.
        self.state.records.append(OfVariables(vars(F), tuple(vars(F))))
        modules = list(model.modules())
        # Before the visits: each module is visited once, as itself, not through another one.
        self._seen.update((id(module), module) for module in modules)
        for module in modules:
            for attribute in self._visit_module(module, _DEEPEST):
                self.visit(attribute, _DEEPEST - 1 if _is_of_user(attribute) else _DEEPEST_IN_LIBRARY)

    def visit(self, value: Any, depth: int) -> None:
        """Visit a value, and all objects that are at most `depth` references away, in `visited`."""
        if depth >= 0 and type(value) not in _WITHOUT_STATE and id(value) not in self._seen:
            self._waiting[depth].append(value)

    def visited(self) -> PythonState:
        """Return the state of all objects after their visits."""
        while any(self._waiting):
            depth = max(depth for depth, values in enumerate(self._waiting) if values)
            while self._waiting[depth]:
                value = self._waiting[depth].pop()
                if id(value) not in self._seen and not (isinstance(value, ModuleType) and value is not os):
                    # Before its parts, which may refer back to it.
                    self._seen[id(value)] = value
                    self._visit(value, depth)
        return self.state

    def _visit(self, value: Any, depth: int) -> None:
        if type(value) in weakref.ProxyTypes:
            self.visit(_owner_of_proxy(value), depth)
        elif isinstance(value, _WITHOUT_PARTS) or value is os:
            if (record := _record_of(value)) is not None:
                self.state.records.append(record)
            elif isinstance(value, torch.Tensor) and _is_plain(value) and may_change(value):
                self.state.large_tensors.append(value)
        elif isinstance(value, ITERATORS):
            iterator = OfIterator(value)
            self.state.records.append(iterator)
            self.state.iterators.append(iterator)
        elif isinstance(value, type):
            self._visit_class(value, depth)
        elif isinstance(value, MethodType):
            self.visit(value.__self__, depth)
            self.visit(value.__func__, depth)
        elif isinstance(value, BuiltinMethodType | MethodWrapperType):  # such as `append` of a list
            self.visit(value.__self__, depth)
        elif isinstance(value, functools.partial):
            self._visit_items([value.func, *value.args, *value.keywords.values()], depth)
        elif isinstance(value, FunctionType):
            if not is_foreign(value):
                self._visit_function(value, depth)
        elif isinstance(value, _CACHED):
            self._visit_cached(value, depth)
        elif isinstance(value, CONTAINERS):
            self._visit_container(value, depth)
        elif isinstance(value, FIXED):
            self._visit_items(items_of(value), depth)
        elif isinstance(value, ContextVar):
            variable = OfContextVariable(value)
            self.state.records.append(variable)
            self.visit(variable.content, depth - 1)
        elif isinstance(value, weakref.ref):
            self.visit(value(), depth)
        elif isinstance(value, memoryview):
            self.visit(value.obj, depth)
        else:
            self._visit_other(value, depth)

    def _visit_other(self, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module):  # one that is not registered as a part of the model
            for attribute in self._visit_module(value, depth):
                self.visit(attribute, depth - 1)
            for part in (*value.buffers(recurse=False), *value.children()):  # one object with the module
                self.visit(part, depth)
        elif isinstance(value, MappingProxyType):
            self._visit_items(dict(value), depth)
        elif isinstance(value, _HOLDERS):
            self._visit_object(value, depth + 1)  # the attributes are one object with their holder
        elif not is_foreign(type(value)):
            self._visit_object(value, depth)

    def _visit_function(self, function: FunctionType, depth: int) -> None:
        names = names_of(function.__code__)
        for cell in function.__closure__ or ():
            try:
                record = OfCell(cell)
            except ValueError:  # it is empty
                continue
            self.state.records.append(record)
            if isinstance(record.content, ModuleType):
                self._visit_module_of_python(record.content, names, depth)
            else:
                self.visit(record.content, depth - 1)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.visit(default, depth - 1)
        self._visit_attributes(function, depth)
        self._visit_variables(function.__globals__, names, depth)
        for name in names:
            module = None if name in function.__globals__ else sys.modules.get(name)
            if isinstance(module, ModuleType):  # the function may import it
                self._visit_module_of_python(module, names, depth)
            if name not in self._named:
                self._named.add(name)
                for method, depth_of_method in self._unnamed.pop(name, ()):
                    self.visit(method, depth_of_method)

    def _visit_cached(self, function: Any, depth: int) -> None:
        self.state.caches.append((function, function.cache_info().currsize))
        self.visit(function.__wrapped__, depth)

    def _visit_variables(self, space: dict[str, Any], names: tuple[str, ...], depth: int) -> None:
        """Record the variables of a Python module that a function names. Others are not its state."""
        used = OfVariables(space, names)
        self.state.records.append(used)
        for value in used.values.values():
            if isinstance(value, ModuleType) and value is not os:
                self._visit_module_of_python(value, names, depth)
            elif is_of_foreign(space.get("__name__")):
                continue
            # The code of a library's functions would lead through all of the library.
            elif not isinstance(value, FunctionType) or is_followed(value):
                self._visit_shared(value, depth - 1)
            elif not is_foreign(value):
                self._visit_attributes(value, depth - 1)

    def _visit_module_of_python(self, module: ModuleType, names: tuple[str, ...], depth: int) -> None:
        """Record the variables of a Python module that a function names, where it refers to the module."""
        if module is os:  # stands for the environment variables
            self.visit(module, depth)
        elif depth > 0:  # `tanh` in `torch.tanh`, which a context may replace
            self._visit_variables(vars(module), names, depth - 1)

    def _visit_shared(self, value: Any, depth: int) -> None:
        """Record the state of a variable of a Python module or a class. A dictionary is a registry."""
        if isinstance(value, dict) and depth >= 0 and id(value) not in self._seen:
            self._seen[id(value)] = value
            registry = OfRegistry(value)
            self.state.records.append(registry)
            self._visit_items(registry.items, depth)
        else:
            self.visit(value, depth)

    def _visit_container(self, container: Any, depth: int) -> None:
        record = OfContainer(container)
        self.state.records.append(record)
        self._visit_items(record.items, depth)
        if not is_foreign(type(container)):  # a class of the user, whose objects have attributes too
            self._visit_object(container, depth)

    def _visit_items(self, items: Items, depth: int) -> None:
        if len(items) <= _LARGEST:
            for item in (*items, *items.values()) if isinstance(items, dict) else items:
                self.visit(item, depth - 1)

    def _visit_class(self, cls: type, depth: int) -> None:
        self.visit(type(cls), depth)
        for base in cls.__mro__:
            if base is not cls and id(base) in self._seen:
                continue
            if is_of_foreign(base.__module__):
                if issubclass(base, nn.Module):  # a context may replace the forward of all `nn.Linear`
                    self._seen[id(base)] = base
                    self.state.records.append(OfClass(base, "forward"))
                continue
            self._seen[id(base)] = base
            record = OfClass(base)
            self.state.records.append(record)
            for value in record.attributes.values():
                if not isinstance(value, FunctionType):  # not a method
                    self._visit_shared(value, depth - 1)
            if not is_of_library(base.__module__):
                self._visit_methods(base, depth)

    def _visit_methods(self, cls: type, depth: int) -> None:
        """Visit the methods that Python calls by itself, and those that a visited function names."""
        for name, attribute in vars(cls).items():
            for method in functions_of_attribute(attribute):
                if name in self._named or name[:2] == name[-2:] == "__":
                    self.visit(method, depth)
                else:
                    self._unnamed.setdefault(name, []).append((method, depth))

    def _visit_attributes(self, value: Any, depth: int) -> None:
        record = OfContainer(vars(value))
        self.state.records.append(record)
        for part in vars(value).values():
            self.visit(part, depth - 1)

    def _visit_object(self, value: Any, depth: int) -> None:
        self.visit(type(value), depth)
        if hasattr(value, "__dict__"):
            self._visit_attributes(value, depth)
        for content in self._visit_slots(value):
            self.visit(content, depth - 1)

    def _visit_slots(self, value: Any) -> list[Any]:
        """Record the attributes of an object that are in slots, and return them."""
        kind: Any = type(value)
        slots = [OfSlot(slot, value) for slot in _slots_of_class(kind)]
        self.state.records += slots
        return [slot.content for slot in slots]

    def _visit_module(self, module: nn.Module, depth: int) -> list[Any]:
        """Record the state of a module, and return the attributes of the user's code."""
        attributes = vars(module)
        self.visit(type(module), depth)
        for name in _STATE_OF_TORCH:
            if isinstance(container := attributes.get(name), CONTAINERS):
                self.state.records.append(OfContainer(container))
        owners = [param for param in attributes.get("_parameters", {}).values() if param is not None]
        records = [_OfOwnAttributes(attributes, _own_attributes)]
        records += [_OfOwnAttributes(vars(param), attributes_of_parameter) for param in owners]
        self.state.records += records
        own = [attribute for record in records for attribute in record.own.values()]
        return own + self._visit_slots(module)


@final
class _OfOwnAttributes(Record):
    """The attributes of a module or a parameter that belong to the user's code.

    Args:
        attributes: all attributes.
        own_of: returns those of the user's code among them.
    """

    __slots__ = ("_attributes", "_own_of", "own")

    def __init__(
        self, attributes: dict[str, Any], own_of: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        self._attributes, self._own_of = attributes, own_of
        self.own = own_of(attributes)

    def is_present(self) -> bool:
        return has_items(self._own_of(self._attributes), self.own)

    def put_back(self) -> None:
        now = self._own_of(self._attributes)
        if not has_items(now, self.own):
            for name in now.keys() - self.own.keys():
                del self._attributes[name]
            put_changed(self._attributes, self.own)

    def again(self) -> Record:
        return _OfOwnAttributes(self._attributes, self._own_of)


def attributes_of_parameter(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a parameter without those of this package."""
    return {
        name: value
        for name, value in attributes.items()
        if name != "home" and not name.startswith("_headwater")
    }


def _is_of_user(attribute: Any) -> bool:
    """True for a function, a container or an object of the user's code, not of an installed library."""
    kind = type(attribute)
    return issubclass(kind, _PARTS_OF_CODE) or not is_of_library(kind.__module__)


def _owner_of_proxy(proxy: Any) -> Any:
    """Return the object that a weak proxy stands for; `None` if it is gone."""
    try:
        return proxy.__init__.__self__
    except ReferenceError:
        return None


def _record_of(value: Any) -> Record | None:
    """Return a record of an object without parts; `None` if its state is too large or cannot be restored."""
    if isinstance(value, torch.Tensor):
        small = _is_plain(value) and value.nbytes <= _LARGEST_TENSOR_BYTES
        return OfTensor(value) if small and may_change(value) else None
    if isinstance(value, np.ndarray):
        small = value.nbytes <= _LARGEST_ARRAY_BYTES and value.flags.writeable
        return OfArray(value) if small and not value.dtype.hasobject else None
    if isinstance(value, io.BytesIO | io.StringIO):
        small = not value.closed and len(value.getvalue()) <= _LARGEST_ARRAY_BYTES
        return OfBuffer(value) if small else None
    if isinstance(value, BYTES):
        return OfBytes(value) if len(value) <= _LARGEST_ARRAY_BYTES else None
    return OfGenerator(value) if isinstance(value, GENERATORS) else OfEnvironment()


def _is_plain(tensor: torch.Tensor) -> bool:
    """True for a tensor with values; false for fake tensors and other subclasses, which may lack them."""
    return type(tensor) is torch.Tensor and not is_functorch_wrapped_tensor(tensor) and not tensor.is_meta


def _own_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module without those of torch and without a forward of this package."""
    return {
        name: value
        for name, value in attributes.items()
        if name not in _OF_TORCH and not (name == "forward" and is_foreign(value))
    }
