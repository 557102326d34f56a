"""Records of the Python objects that a model's functions and modules can reach, to undo changes to them."""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
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
from torch.nn.modules import module as global_hooks
from torch.utils._pytree import tree_leaves

from headwater.core.containers import CONTAINERS, Items, has_items
from headwater.core.errors import StreamError
from headwater.core.foreign import HOLDERS, is_foreign, is_of_foreign, slots_of
from headwater.core.python_records import (
    ITERATORS,
    OfArray,
    OfBuffer,
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
from headwater.core.random_states import DEFAULTS, GENERATORS
from headwater.core.tensor_values import copies_of, may_change, put_back

_DEEPEST = 4
"""Maximum references to follow from a function: to a cell, an object, its dictionary, a list in it."""

_DEEPEST_IN_MODULE = 2
"""Maximum references to follow from an attribute of a module: to an object, a list in it."""

_LARGEST = 1000
"""The items of larger containers are not visited."""

_LARGEST_ARRAY_BYTES = 1 << 20
"""The values of larger numpy arrays are not recorded."""

_LARGEST_TENSOR_BYTES = 1 << 16
"""The values of larger tensors are not recorded: a forward may reach a whole data set."""

_LARGEST_COPIED_ONCE = 1 << 26
"""A dry run also copies tensors up to this size, since it happens once for each plan."""

_WITHOUT_PARTS = (torch.Tensor, np.ndarray, io.BytesIO, io.StringIO, type(os.environ), *GENERATORS)
"""Classes of objects that are recorded as a whole."""

_CACHED: tuple[type, ...] = (type(functools.lru_cache(len)),)
"""The class of functions whose results `functools` caches."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The dictionaries in which torch keeps the hooks of a module."""

_STATE_OF_TORCH = (
    *("_parameters", "_buffers", "_modules", *HOOKS),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
)
"""The dictionaries of a module whose items belong to its state, beside its own attributes."""

_RUN_WITH_FORWARDS = ("__call__", "__getattr__", "__getattribute__", "__setattr__")
"""The other methods of a module that may run in a call of it."""

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"} | {"_call_impl", "_compiled_call_impl"}
"""The attributes of a module that torch makes, and those that replace its call."""

_WITHOUT_STATE = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device})
"""Classes of values that refer to no other objects. They are skipped, as most attributes have them."""

_LIBRARIES = frozenset({"site-packages", "dist-packages"})
"""The names of folders of installed libraries."""


def functions_of(model: nn.Module) -> list[Any]:
    """Return the hooks and forwards of a model and its parts that are not torch's or this package's.

    Methods that run in a forward belong to them, such as a `__getattr__` that looks up weights elsewhere, or
    those that the code of the user calls by name.
    """
    found: dict[int, Any] = {}
    for registry in ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_hooks"):
        found.update((id(hook), hook) for hook in getattr(global_hooks, registry, {}).values())
    for module in model.modules():
        attributes = vars(module)
        for name in HOOKS:
            found.update((id(hook), hook) for hook in attributes.get(name, {}).values())
        if (forward := attributes.get("forward")) is not None:
            found[id(forward)] = forward
        kind: Any = type(module)
        found.update((id(method), method) for method in _methods_of(kind))
    return [function for function in found.values() if not is_foreign(function)]


def functions_in(call: object) -> list[Any]:
    """Return the functions among the arguments of a call, in any nesting.

    A dry run gets copies of other arguments, but a copy of a function has the same state.
    """
    kinds = FunctionType, BuiltinMethodType, MethodType, functools.partial
    return [leaf for leaf in tree_leaves(call) if isinstance(leaf, kinds)]


@functools.lru_cache(maxsize=4096)
def _methods_of(cls: type[nn.Module]) -> list[Any]:
    """Return the methods of a module's class that may run in a call of it."""
    others = (getattr(cls, name, None) for name in _RUN_WITH_FORWARDS)
    methods: list[Any] = [method for method in others if isinstance(method, FunctionType)]
    # `super().forward` runs those of bases. TorchScript's classes have a `forward` that cannot be read.
    methods += [vars(base).get("forward") for base in cls.__mro__ if issubclass(base, nn.Module)]
    found = {id(method): method for method in methods if method is not None}
    todo = [method for method in found.values() if isinstance(method, FunctionType)]
    while todo:
        method = todo.pop()
        for name in _names_of(method.__code__) if _is_followed(method) else ():
            called = getattr(cls, name, None)
            if isinstance(called, FunctionType) and _is_followed(called) and id(called) not in found:
                found[id(called)] = called
                todo.append(called)
    return [method for method in found.values() if not is_foreign(method)]


@functools.lru_cache(maxsize=4096)
def _names_of(code: CodeType) -> tuple[str, ...]:
    """Return the names of variables and attributes in the code of a function and of functions inside it."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(dict.fromkeys(_names_of(constant)))
    return tuple(names)


@contextmanager
def effects_undone(model: nn.Module, arguments: Sequence[Any] = ()) -> Iterator[None]:
    """Enter a context. At its end, restore all Python objects that a model's forward and hooks can reach.

    Changes of tensors of more than 64 MiB, of numpy arrays of more than 1 MiB, files and anything outside of
    Python's objects stay.

    Args:
        model: the model.
        arguments: functions that the caller passes to the model.

    Raises:
        StreamError: if an iterator has advanced that cannot go back.
    """
    before = PythonState.of(model, arguments)
    with undone(before, _LARGEST_COPIED_ONCE):
        yield
    before.refuse_advanced_iterators()


@contextmanager
def undone(before: PythonState, largest_tensor: int = 0) -> Iterator[None]:
    """Enter a context. At its end, restore a state that was recorded immediately before it.

    Args:
        before: the state.
        largest_tensor: tensors that the state has no copy of are restored too, up to this number of bytes.
    """
    # Not by their versions: a dry run counts changes by fake tensors, which change no values.
    values = copies_of([tensor for tensor in before.large_tensors if tensor.nbytes <= largest_tensor])
    try:
        yield
    finally:
        before.put_back()
        before.clear_grown_caches()
        put_back(values)


def reached_from_class(cls: type, others: Iterable[Any] = ()) -> PythonState:
    """Record the state of all objects that the methods of a class, or other objects, reach.

    Args:
        cls: the class. Methods of torch's and Python's classes among its bases are left out.
        others: objects that the methods use, such as arguments of the constructor.
    """
    state = PythonState()
    state.visit(cls, _DEEPEST)
    for base in cls.__mro__:
        for attribute in vars(base).values():
            method = getattr(attribute, "fget", getattr(attribute, "__func__", attribute))
            if isinstance(method, FunctionType):
                state.visit(method, _DEEPEST)
    for value in others:
        state.visit(value, _DEEPEST)
    return state


def refuse_changed_tensors(versions: list[tuple[torch.Tensor, int]]) -> None:
    """Raise if a run of a forward that must leave no trace has changed a tensor.

    Args:
        versions: tensors with their version counters before the run.

    Raises:
        StreamError: if one of the versions has changed.
    """
    for tensor, version in versions:
        if tensor._version != version:
            raise StreamError(
                f"the forward changes a tensor of shape {list(tensor.shape)} that is not a buffer of its "
                "module. Headwater runs a forward more than once, which would change the tensor twice",
                remedy="make the tensor a buffer (register_buffer), or change it outside of the forward",
            )


@final
class PythonState:
    """A record of objects, variables, containers and random generators, which can be restored later.

    Larger tensors and parameters are remembered as objects, without their values.
    """

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}  # keeps them alive, so that an identity means one object
        self._records: list[Record] = []
        self._iterators: list[OfIterator] = []
        self._caches: list[tuple[Any, int]] = []  # functions whose results are cached, and their number
        self.large_tensors: list[torch.Tensor] = []
        """Tensors that a forward may change in place, and whose values are not recorded."""

    @classmethod
    def of(cls, model: nn.Module, arguments: Sequence[Any] = ()) -> PythonState:
        """Record the state of a model's modules, and of all objects that their hooks and forwards reach.

        Args:
            model: the model.
            arguments: functions that the caller passes to the model.
        """
        state = cls()
        state._records.append(
            OfVariables(vars(F), tuple(vars(F)))
        )  # the layers of torch call these functions
        modules = list(model.modules())
        # Before the visits: each module is visited once, as itself, not through another one.
        state._seen.update((id(module), module) for module in modules)
        for module in modules:
            state._visit_module(module, _DEEPEST_IN_MODULE)
        functions = [*functions_of(model), *arguments]
        for function in functions:
            state.visit(function, _DEEPEST)
        if functions:  # torch's own modules draw from torch's generator only
            state._records += map(OfGenerator, DEFAULTS)
        return state

    def visit(self, value: Any, depth: int) -> None:
        """Record the state of a value, and of all objects that are at most `depth` references away."""
        if depth < 0 or type(value) in _WITHOUT_STATE or id(value) in self._seen:
            return
        if isinstance(value, ModuleType) and value is not os:
            return
        # Before its parts, which may refer back to it.
        self._seen[id(value)] = value
        if isinstance(value, _WITHOUT_PARTS) or value is os:
            if (record := _record_of(value)) is not None:
                self._records.append(record)
            elif isinstance(value, torch.Tensor) and _is_plain(value) and may_change(value):
                self.large_tensors.append(value)
        elif isinstance(value, ITERATORS):
            iterator = OfIterator(value)
            self._records.append(iterator)
            self._iterators.append(iterator)
        elif isinstance(value, type):
            self._visit_class(value, depth)
        elif isinstance(value, MethodType):
            self.visit(value.__self__, depth)
            self.visit(value.__func__, depth)
        elif isinstance(value, BuiltinMethodType | MethodWrapperType):  # such as `append` of a list
            self.visit(value.__self__, depth)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.visit(part, depth - 1)
        elif isinstance(value, FunctionType):
            if not is_foreign(value):
                self._visit_function(value, depth)
        elif isinstance(value, _CACHED):
            self._visit_cached(value, depth)
        elif isinstance(value, CONTAINERS):
            self._visit_container(value, depth)
        elif isinstance(value, ContextVar):
            variable = OfContextVariable(value)
            self._records.append(variable)
            self.visit(variable.content, depth - 1)
        elif isinstance(value, nn.Module):  # one that is not registered as a part of the model
            self._visit_module(value, depth)
            for part in (*value.buffers(recurse=False), *value.children()):  # one object with the module
                self.visit(part, depth)
        elif isinstance(value, HOLDERS):
            self._visit_object(value, depth + 1)  # the attributes are one object with their holder
        elif not is_foreign(type(value)):
            self._visit_object(value, depth)

    def _visit_function(self, function: FunctionType, depth: int) -> None:
        for cell in function.__closure__ or ():
            try:
                record = OfCell(cell)
            except ValueError:  # it is empty
                continue
            self._records.append(record)
            self.visit(record.content, depth - 1)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.visit(default, depth - 1)
        self._visit_attributes(function, depth)
        self._visit_variables(function.__globals__, _names_of(function.__code__), depth)

    def _visit_cached(self, function: Any, depth: int) -> None:
        self._caches.append((function, function.cache_info().currsize))
        self.visit(function.__wrapped__, depth)

    def _visit_variables(self, space: dict[str, Any], names: tuple[str, ...], depth: int) -> None:
        """Record the variables of a Python module that a function names. Others are not its state."""
        used = OfVariables(space, names)
        self._records.append(used)
        for value in used.values.values():
            if isinstance(value, ModuleType) and value is not os:
                if depth > 0:  # `tanh` in `torch.tanh`, which a context may replace
                    self._visit_variables(vars(value), names, depth - 1)
            elif is_of_foreign(space.get("__name__")):
                continue
            # The code of a library's functions would lead through all of the library.
            elif not isinstance(value, FunctionType) or _is_followed(value):
                self._visit_shared(value, depth - 1)
            elif not is_foreign(value):
                self._visit_attributes(value, depth - 1)

    def _visit_shared(self, value: Any, depth: int) -> None:
        """Record the state of a variable of a Python module or a class. A dictionary is a registry."""
        if isinstance(value, dict) and depth >= 0 and id(value) not in self._seen:
            self._seen[id(value)] = value
            registry = OfRegistry(value)
            self._records.append(registry)
            self._visit_items(registry.items, depth)
        else:
            self.visit(value, depth)

    def _visit_container(self, container: Any, depth: int) -> None:
        record = OfContainer(container)
        self._records.append(record)
        self._visit_items(record.items, depth)

    def _visit_items(self, items: Items, depth: int) -> None:
        if len(items) <= _LARGEST:
            for item in items.values() if isinstance(items, dict) else items:
                self.visit(item, depth - 1)

    def _visit_class(self, cls: type, depth: int) -> None:
        for base in cls.__mro__:
            if base is not cls and id(base) in self._seen:
                continue
            if is_of_foreign(base.__module__):
                if issubclass(base, nn.Module):  # a context may replace the forward of all `nn.Linear`
                    self._seen[id(base)] = base
                    self._records.append(OfClass(base, "forward"))
                continue
            self._seen[id(base)] = base
            record = OfClass(base)
            self._records.append(record)
            for value in record.attributes.values():
                if not isinstance(value, FunctionType):  # not a method
                    self._visit_shared(value, depth - 1)

    def _visit_attributes(self, value: Any, depth: int) -> None:
        record = OfContainer(vars(value))
        self._records.append(record)
        for part in vars(value).values():
            self.visit(part, depth - 1)

    def _visit_object(self, value: Any, depth: int) -> None:
        self.visit(type(value), depth)
        if hasattr(value, "__dict__"):
            self._visit_attributes(value, depth)
        for slot in slots_of(type(value)):
            record = OfSlot(slot, value)
            self._records.append(record)
            self.visit(record.content, depth - 1)

    def _visit_module(self, module: nn.Module, depth: int) -> None:
        attributes = vars(module)
        self.visit(type(module), depth)
        for name in _STATE_OF_TORCH:
            if isinstance(container := attributes.get(name), CONTAINERS):
                self._records.append(OfContainer(container))
        owners = [param for param in attributes.get("_parameters", {}).values() if param is not None]
        records = [_OfOwnAttributes(attributes, _own_attributes)]
        records += [_OfOwnAttributes(vars(param), attributes_of_parameter) for param in owners]
        self._records += records
        for record in records:
            for attribute in record.own.values():
                self.visit(attribute, depth - 1)

    def refuse_advanced_iterators(self) -> None:
        """Raise if an iterator has advanced since the state was recorded. Call this after `put_back`.

        Raises:
            StreamError: if there is such an iterator.
        """
        for iterator in self._iterators:
            if not iterator.is_present():
                raise StreamError(
                    "the forward takes the next value of an iterator. Headwater runs a forward more than "
                    f"once, and a {type(iterator.iterator).__name__} cannot go back",
                    remedy="call next(...) outside of the forward, and pass its value to the model as an "
                    "argument; or count the calls in an attribute",
                )

    def clear_grown_caches(self) -> None:
        """Clear caches of functions that have new results: a dry run puts tensors without values there."""
        for function, size in self._caches:
            if function.cache_info().currsize > size:
                function.cache_clear()

    def versions_of_large_tensors(self) -> list[tuple[torch.Tensor, int]]:
        """Return the tensors whose values are not recorded, each with its present version counter."""
        return [(tensor, tensor._version) for tensor in self.large_tensors]

    def add_places_of(self, other: PythonState) -> None:
        """Record also the present state of all objects that `other` has recorded."""
        self._records += [record.again() for record in other._records]

    def is_present(self) -> bool:
        """True if nothing has changed since the state was recorded."""
        return all(record.is_present() for record in self._records)

    def put_back(self) -> None:
        """Restore the recorded state of all objects that have changed."""
        for record in self._records:
            record.put_back()


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


def _is_followed(function: FunctionType) -> bool:
    """True for a function that is not of an installed library, but of the user."""
    return not _is_of_library(function.__module__)


@functools.lru_cache(maxsize=4096)
def _is_of_library(module: str | None) -> bool:
    path = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return is_of_foreign(module) or not _LIBRARIES.isdisjoint(Path(path).parts)
