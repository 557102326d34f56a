"""Tensors in what modules take and return: nested containers, and dataclasses too."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """A copy of `tree` with `function` applied to each tensor, always in the same order."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        changed = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            object.__setattr__(changed, field.name, map_tensors(function, getattr(leaf, field.name)))
        return changed

    return tree_map(of_leaf, tree)


def list_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in `tree`, in the order of `map_tensors`."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, tree)
    return found
