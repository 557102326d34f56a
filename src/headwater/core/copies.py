"""Copies of the arguments of a forward, so that it can run twice."""

from __future__ import annotations

import copy
import gc
from types import FrameType, FunctionType, GeneratorType, ModuleType, TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

T = TypeVar("T")

_WHOLE = (torch.Tensor, FunctionType, type, ModuleType, GeneratorType, FrameType, TracebackType)
"""Classes of objects that a deep copy shares, or cannot copy."""


def copied_arguments(tree: T) -> T:
    """Return `tree` with copies of everything that a forward may change in it, such as a key-value cache.

    Tensors and modules are shared with the original, also those inside of objects: a copy of a module would
    have no hooks of the engine. Objects that cannot be copied, such as generators, are shared too.
    """
    with _SharedTensors():
        copies: T = tree_map(_copied, tree)
    return copies


def modules_in(value: Any) -> list[nn.Module]:
    """Return the modules to which a value refers, directly or through other objects.

    They are those that a deep copy of the value would copy: the module of a bound method, or one in a
    `functools.partial`, a list or an attribute, but not one in a variable of a function.
    """
    found: list[nn.Module] = []
    seen: dict[int, Any] = {}  # keeps the objects alive, so that an identity means one object
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _WHOLE):
            continue
        seen[id(value)] = value
        if isinstance(value, nn.Module):
            found.append(value)
        else:
            waiting += gc.get_referents(value)
    return found


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor | nn.Module):
        return leaf
    shared = {id(module): module for module in modules_in(leaf)}  # `deepcopy` takes them for copies
    try:
        return copy.deepcopy(leaf, shared)
    except Exception:  # noqa: BLE001 - a user's class can raise anything; the call then shares the object
        return leaf


class _SharedTensors(TorchFunctionMode):
    """A context in which a deep copy refers to the tensors of its original instead of copies."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.__deepcopy__ else func(*args, **(kwargs or {}))
