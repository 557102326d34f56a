"""Copies of the arguments of a call, for a forward that is to run twice."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

T = TypeVar("T")


def apart(tree: T) -> T:
    """`tree` with copies of what a forward may change in it, such as a cache of keys and values.

    Tensors and modules are shared with the original; so is what cannot be copied, an iterator say.
    """
    with _SharedTensors():
        copies: T = tree_map(_copied, tree)
    return copies


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor | nn.Module):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except TypeError:
        return leaf


class _SharedTensors(TorchFunctionMode):
    """Within it a deep copy has the tensors of the original."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.__deepcopy__ else func(*args, **(kwargs or {}))
