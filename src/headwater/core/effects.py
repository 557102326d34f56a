"""Restores Python state that a user's functions can reach, after a run that does not count."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from headwater.core.containers import CONTAINERS, items_of, restore

_DEEPEST = 4
"""Steps from a function to what it reaches: a cell, an object in it, a dictionary of that, a list in it."""

_LARGEST = 1000
"""The items of larger containers are not looked into."""

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "headwater", "builtins"}


def functions_of(model: nn.Module) -> list[Any]:
    """Return the hooks and forwards of a model and its parts that are not torch's or this package's."""
    found: dict[int, Any] = {}
    for registry in ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_hooks"):
        found.update((id(hook), hook) for hook in getattr(global_hooks, registry, {}).values())
    for module in model.modules():
        attributes = vars(module)
        for name in _HOOKS:
            found.update((id(hook), hook) for hook in attributes.get(name, {}).values())
        # TorchScript's classes have a `forward` that cannot be read.
        for forward in (attributes.get("forward"), getattr(type(module), "forward", None)):
            if forward is not None:
                found[id(forward)] = forward
    return [function for function in found.values() if not _is_foreign(function)]


@contextmanager
def effects_undone(functions: Iterable[Any]) -> Iterator[None]:
    """Undo what the context does to the variables, objects and containers that these functions reach.

    Changes of tensors in place, files and anything outside of Python's objects stay.
    """
    before = _Reached()
    for function in functions:
        before.visit(function, _DEEPEST)
    try:
        yield
    finally:
        before.put_back()


class _Reached:
    """The state that functions reach, as it was when they were visited."""

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}  # keeps them alive, so that an identity means one object
        self._containers: list[tuple[Any, Any]] = []
        self._cells: list[tuple[CellType, object]] = []
        self._globals: list[tuple[dict[str, Any], str, object]] = []
        self._attributes: list[tuple[dict[str, Any], str, object]] = []
        self._objects: list[tuple[dict[str, Any], frozenset[str]]] = []

    def visit(self, value: Any, depth: int) -> None:
        """Remember the state of a value and of everything that it reaches in `depth` steps."""
        if depth < 0 or id(value) in self._seen or isinstance(value, torch.Tensor | type | ModuleType):
            return
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
        elif hasattr(value, "__dict__") and not _is_foreign(type(value)):
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
        for name in function.__code__.co_names:
            if name in space:
                self._globals.append((space, name, space[name]))
                if not isinstance(space[name], FunctionType):
                    self.visit(space[name], depth - 1)

    def _visit_container(self, container: Any, depth: int) -> None:
        items = items_of(container)
        self._containers.append((container, items))
        if len(items) <= _LARGEST:
            for item in items.values() if isinstance(items, dict) else items:
                self.visit(item, depth - 1)

    def _visit_object(self, value: Any, depth: int) -> None:
        attributes = vars(value)
        hidden = isinstance(value, nn.Module)  # names with an underscore are torch's
        names = [name for name in attributes if not (hidden and name.startswith("_"))]
        for name in names:
            self._attributes.append((attributes, name, attributes[name]))
            self.visit(attributes[name], depth - 1)
        if not hidden:
            self._objects.append((attributes, frozenset(names)))

    def put_back(self) -> None:
        """Give everything that has changed its former state."""
        for cell, content in self._cells:
            cell.cell_contents = content
        for space, name, value in (*self._globals, *self._attributes):
            if name not in space or space[name] is not value:
                space[name] = value
        for attributes, names in self._objects:
            for name in attributes.keys() - names:
                del attributes[name]
        for container, items in self._containers:
            restore(container, items)


def _is_foreign(value: Any) -> bool:
    """True if a function or class belongs to Python, torch, numpy or this package."""
    module = getattr(getattr(value, "__func__", value), "__module__", None) or ""
    return module.partition(".")[0] in _FOREIGN
