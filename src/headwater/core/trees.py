"""Walking what users nest tensors in: sequences, mappings, dataclasses, whatever torch's pytrees know."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_map_with_path


def map_leaves(change: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """`tree` with each leaf in it changed.

    Args:
        change: makes the new leaf of the path and the old one; a path reads `['labels'][0]`.
        tree: nested in any way.
        path: where `tree` itself lies.
    """

    def leaf(keys: Any, value: Any) -> Any:
        here = path + keystr(keys)
        if isinstance(value, Mapping):  # one that torch does not know, such as the batches of transformers
            items = {key: map_leaves(change, item, f"{here}[{key!r}]") for key, item in value.items()}
            return type(value)(items)  # type: ignore[call-arg]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _map_fields(change, value, here)
        return change(here, value)

    return tree_map_with_path(leaf, tree)


def _map_fields(change: Callable[[str, Any], Any], value: Any, path: str) -> Any:
    changed = copy.copy(value)
    for field in dataclasses.fields(value):
        item = map_leaves(change, getattr(value, field.name), f"{path}.{field.name}")
        object.__setattr__(changed, field.name, item)  # a frozen one refuses its own
    return changed


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """`tree` with each tensor in it changed; other leaves stay."""
    return map_leaves(lambda _, leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in `tree`, in the order of `map_tensors`."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, tree)
    return found
