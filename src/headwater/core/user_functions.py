"""The functions of the user that run in a call of a model, and the names in their code."""

from __future__ import annotations

import functools
import sys
import weakref
from pathlib import Path
from types import BuiltinMethodType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as global_hooks
from torch.utils._pytree import tree_leaves

from headwater.core.copies import modules_in
from headwater.core.foreign import is_foreign, is_of_foreign

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The dictionaries in which torch keeps the hooks of a module."""

_RUN_WITH_FORWARDS = ("__call__", "__getattr__", "__getattribute__", "__setattr__")
"""The other methods of a module that may run in a call of it."""

_LIBRARIES = frozenset({"site-packages", "dist-packages"})
"""The names of folders of installed libraries."""


def functions_of(model: nn.Module) -> list[Any]:
    """Return the hooks and forwards of a model and its parts that are not torch's or this package's.

    Methods that run in a call belong to them, such as a `__getattr__` that looks up weights elsewhere.
    """
    found: dict[int, Any] = {}
    for registry in ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_hooks"):
        found.update((id(hook), hook) for hook in getattr(global_hooks, registry, {}).values())
    kinds: dict[type[nn.Module], None] = {}
    for module in model.modules():
        attributes = vars(module)
        for name in HOOKS:
            found.update((id(hook), hook) for hook in attributes.get(name, {}).values())
        if (forward := attributes.get("forward")) is not None:
            found[id(forward)] = forward
        kinds[type(module)] = None
    for kind in kinds:  # not cached by class: a user may replace the forward of a class
        found.update((id(method), method) for method in _methods_of(kind))
    return [function for function in found.values() if not is_foreign(function)]


def functions_in(call: object) -> list[Any]:
    """Return the functions and modules among the arguments of a call, in any nesting.

    A dry run gets copies of other arguments, but a copy of a function has the same state, and modules are
    not copied.
    """
    kinds = FunctionType, BuiltinMethodType, MethodType, functools.partial, weakref.ref
    leaves = tree_leaves(call)
    return [*modules_in(leaves), *(leaf for leaf in leaves if isinstance(leaf, kinds))]


def _methods_of(cls: type[nn.Module]) -> list[Any]:
    """Return the methods of a module's class that Python or torch runs in a call of it."""
    others = (getattr(cls, name, None) for name in _RUN_WITH_FORWARDS)
    methods: list[Any] = [method for method in others if isinstance(method, FunctionType)]
    # `super().forward` runs those of bases. TorchScript's classes have a `forward` that cannot be read.
    methods += [vars(base).get("forward") for base in cls.__mro__ if issubclass(base, nn.Module)]
    found = {id(method): method for method in methods if method is not None}
    return [method for method in found.values() if not is_foreign(method)]


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> tuple[str, ...]:
    """Return the names of variables and attributes in the code of a function and of functions inside it."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(dict.fromkeys(names_of(constant)))
    return tuple(names)


def functions_of_attribute(attribute: Any) -> list[FunctionType]:
    """Return the functions of an attribute of a class: a method, or those of a property."""
    if isinstance(attribute, property):
        functions: list[Any] = [attribute.fget, attribute.fset, attribute.fdel]
    elif isinstance(attribute, functools.cached_property):
        functions = [attribute.func]
    else:
        functions = [getattr(attribute, "__func__", attribute)]  # of a static method or a class method
    return [function for function in functions if isinstance(function, FunctionType)]


def is_followed(function: FunctionType) -> bool:
    """True for a function that is not of an installed library, but of the user."""
    return not is_of_library(function.__module__)


@functools.lru_cache(maxsize=4096)
def is_of_library(module: str | None) -> bool:
    """True for a Python module, by its name, of an installed library, Python, torch or this package."""
    path = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return is_of_foreign(module) or not _LIBRARIES.isdisjoint(Path(path).parts)
