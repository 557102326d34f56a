"""Records of the Python objects that a model's functions and modules can reach, to undo changes to them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from headwater.core.containers import CONTAINERS, Items, has_items, items_of, restore
from headwater.core.random_states import DEFAULTS, GENERATORS, set_state, state_of

_DEEPEST = 4
"""Maximum references to follow from a function: to a cell, an object, its dictionary, a list in it."""

_DEEPEST_IN_MODULE = 2
"""Maximum references to follow from an attribute of a module: to an object, a list in it."""

_LARGEST = 1000
"""The items of larger containers are not visited."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The dictionaries in which torch keeps the hooks of a module."""

_STATE_OF_TORCH = (
    *("_parameters", "_buffers", "_modules", *HOOKS),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"),
)
"""The dictionaries of a module whose items belong to its state, beside its own attributes."""

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"} | {"_call_impl", "_compiled_call_impl"}
"""The attributes of a module that torch makes, and those that replace its call."""

_WITHOUT_STATE = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device})
"""Classes of values that refer to no other objects. They are skipped, as most attributes have them."""

_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "headwater", "builtins"}


def functions_of(model: nn.Module) -> list[Any]:
    """Return the hooks and forwards of a model and its parts that are not torch's or this package's."""
    found: dict[int, Any] = {}
    for registry in ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_hooks"):
        found.update((id(hook), hook) for hook in getattr(global_hooks, registry, {}).values())
    for module in model.modules():
        attributes = vars(module)
        for name in HOOKS:
            found.update((id(hook), hook) for hook in attributes.get(name, {}).values())
        # TorchScript's classes have a `forward` that cannot be read.
        for forward in (attributes.get("forward"), getattr(type(module), "forward", None)):
            if forward is not None:
                found[id(forward)] = forward
    return [function for function in found.values() if not _is_foreign(function)]


@contextmanager
def effects_undone(model: nn.Module) -> Iterator[None]:
    """Enter a context. At its end, restore all Python objects that a model's forward and hooks can reach.

    Changes of tensors in place, files and anything outside of Python's objects stay.
    """
    before = PythonState.of(model)
    try:
        yield
    finally:
        before.put_back()


class PythonState:
    """A record of objects, variables, containers and random generators, which can be restored later.

    Tensors are remembered as objects, without their values.
    """

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}  # keeps them alive, so that an identity means one object
        self._containers: list[tuple[Any, Items]] = []
        self._cells: list[tuple[CellType, object]] = []
        self._globals: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._objects: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._slots: list[tuple[MemberDescriptorType, Any, object]] = []  # with the object and its value
        self._modules: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._generators: list[tuple[Any, Any]] = []

    @classmethod
    def of(cls, model: nn.Module) -> PythonState:
        """Record the state of a model's modules, and of all objects that their hooks and forwards reach."""
        state = cls()
        modules = list(model.modules())
        # Before the visits: each module is visited once, as itself, not through another one.
        state._seen.update((id(module), module) for module in modules)
        for module in modules:
            state._visit_module(module, _DEEPEST_IN_MODULE)
        functions = functions_of(model)
        for function in functions:
            state.visit(function, _DEEPEST)
        if functions:  # torch's own modules draw from torch's generator only
            state._generators += [(generator, state_of(generator)) for generator in DEFAULTS]
        return state

    def visit(self, value: Any, depth: int) -> None:
        """Record the state of a value, and of all objects that are at most `depth` references away."""
        if depth < 0 or type(value) in _WITHOUT_STATE or id(value) in self._seen:
            return
        if isinstance(value, torch.Tensor | type | ModuleType):
            return
        # Before its parts, which may refer back to it.
        self._seen[id(value)] = value
        if isinstance(value, MethodType):
            self.visit(value.__self__, depth)
            self.visit(value.__func__, depth)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.visit(part, depth - 1)
        elif isinstance(value, FunctionType):
            if not _is_foreign(value):
                self._visit_function(value, depth)
        elif isinstance(value, CONTAINERS):
            self._visit_container(value, depth)
        elif isinstance(value, GENERATORS):
            self._generators.append((value, state_of(value)))
        elif isinstance(value, nn.Module) and not _is_foreign(type(value)):
            self._visit_module(value, depth)
        elif not _is_foreign(type(value)):
            self._visit_object(value, depth)

    def _visit_function(self, function: FunctionType, depth: int) -> None:
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # it is empty
                continue
            self._cells.append((cell, content))
            self.visit(content, depth - 1)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.visit(default, depth - 1)
        space = function.__globals__
        used = {name: space[name] for name in function.__code__.co_names if name in space}
        # Only names in the code: a module's other variables are not its state.
        self._globals.append((space, used))
        for value in used.values():
            # Functions that a function calls would lead through whole libraries.
            if not isinstance(value, FunctionType):
                self.visit(value, depth - 1)

    def _visit_container(self, container: Any, depth: int) -> None:
        items = items_of(container)
        self._containers.append((container, items))
        if len(items) <= _LARGEST:
            for item in items.values() if isinstance(items, dict) else items:
                self.visit(item, depth - 1)

    def _visit_object(self, value: Any, depth: int) -> None:
        parts: list[Any] = []
        if hasattr(value, "__dict__"):
            attributes = dict(vars(value))
            self._objects.append((vars(value), attributes))
            parts += attributes.values()
        for slot in _slots_of(type(value)):
            content = _content(slot, value)
            self._slots.append((slot, value, content))
            parts.append(content)
        for part in parts:
            self.visit(part, depth - 1)

    def _visit_module(self, module: nn.Module, depth: int) -> None:
        attributes = vars(module)
        own = _own_attributes(attributes)
        self._modules.append((attributes, own))
        for name in _STATE_OF_TORCH:
            if isinstance(container := attributes.get(name), CONTAINERS):
                self._containers.append((container, items_of(container)))
        for attribute in own.values():
            self.visit(attribute, depth - 1)

    def add_places_of(self, other: PythonState) -> None:
        """Record also the present state of all objects that `other` has recorded."""
        self._containers += [(container, items_of(container)) for container, _ in other._containers]
        self._cells += [(cell, cell.cell_contents) for cell, _ in other._cells]
        for space, used in other._globals:
            self._globals.append((space, {name: space[name] for name in used if name in space}))
        self._objects += [(attributes, dict(attributes)) for attributes, _ in other._objects]
        self._slots += [(slot, value, _content(slot, value)) for slot, value, _ in other._slots]
        self._modules += [(attributes, _own_attributes(attributes)) for attributes, _ in other._modules]
        self._generators += [(generator, state_of(generator)) for generator, _ in other._generators]

    def is_present(self) -> bool:
        """True if nothing has changed since the state was recorded."""
        return (
            all(has_items(container, items) for container, items in self._containers)
            and all(cell.cell_contents is content for cell, content in self._cells)
            and all(_has(space, used) for space, used in self._globals)
            and all(has_items(attributes, before) for attributes, before in self._objects)
            and all(_content(slot, value) is content for slot, value, content in self._slots)
            and all(has_items(_own_attributes(attributes), before) for attributes, before in self._modules)
            and all(state_of(generator) == state for generator, state in self._generators)
        )

    def put_back(self) -> None:
        """Restore the recorded state of all objects that have changed."""
        for cell, content in self._cells:
            cell.cell_contents = content
        for space, used in self._globals:
            _set_changed(space, used)
        for attributes, before in self._objects:
            restore(attributes, before)
        for slot, value, content in self._slots:
            _set_content(slot, value, content)
        for attributes, before in self._modules:
            now = _own_attributes(attributes)
            if not has_items(now, before):
                for name in now.keys() - before.keys():
                    del attributes[name]
                _set_changed(attributes, before)
        for container, items in self._containers:
            restore(container, items)
        for generator, state in self._generators:
            if state_of(generator) != state:
                set_state(generator, state)


def _has(space: dict[str, Any], before: dict[str, Any]) -> bool:
    return all(name in space and space[name] is value for name, value in before.items())


def _set_changed(space: dict[str, Any], before: dict[str, Any]) -> None:
    for name, value in before.items():
        if name not in space or space[name] is not value:
            space[name] = value


def _slots_of(cls: type) -> list[MemberDescriptorType]:
    """Return the descriptors of the attributes that a class and its bases keep in `__slots__`."""
    bases = [base for base in cls.__mro__ if "__slots__" in vars(base) and not _is_foreign(base)]
    return [slot for base in bases for slot in vars(base).values() if isinstance(slot, MemberDescriptorType)]


_EMPTY = object()
"""A mark that stands for a slot without a value."""


def _content(slot: MemberDescriptorType, value: Any) -> object:
    """Return the attribute of an object that is in a slot. A property or `__getattr__` is not called."""
    try:
        content: object = slot.__get__(value)
    except AttributeError:
        return _EMPTY
    return content


def _set_content(slot: MemberDescriptorType, value: Any, content: object) -> None:
    """Set the attribute of an object that is in a slot, also of a frozen dataclass, or empty the slot."""
    if _content(slot, value) is content:
        return
    if content is _EMPTY:
        slot.__delete__(value)
    else:
        slot.__set__(value, content)


def _own_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a module without those of torch and without a forward of this package."""
    return {
        name: value
        for name, value in attributes.items()
        if name not in _OF_TORCH and not (name == "forward" and _is_foreign(value))
    }


def _is_foreign(value: Any) -> bool:
    """True if a function or class is not the user's: it belongs to Python, torch, numpy or this package."""
    while isinstance(value, functools.partial):
        value = value.func  # a partial itself is of functools, whatever it calls
    module = getattr(getattr(value, "__func__", value), "__module__", None) or ""
    return module.partition(".")[0] in _FOREIGN
