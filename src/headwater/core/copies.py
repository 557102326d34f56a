"""Copies of the arguments of a forward, so that it can run twice."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

T = TypeVar("T")


def copied_arguments(tree: T) -> T:
    """Return `tree` with copies of everything that a forward may change in it, such as a key-value cache.

    Tensors and modules are shared with the original. So are objects that cannot be copied, such as iterators.
    """
    with _SharedTensors():
        copies: T = tree_map(_copied, tree)
    return copies


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor | nn.Module):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:  # noqa: BLE001 - a user's class can raise anything; the call then shares the object
        return leaf


class _SharedTensors(TorchFunctionMode):
    """A context in which a deep copy refers to the tensors of its original instead of copies."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.__deepcopy__ else func(*args, **(kwargs or {}))
