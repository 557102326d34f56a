"""Functions on nested tensors: in sequences, mappings, dataclasses, and all classes of torch's pytrees."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_leaves, tree_map_with_path


def map_leaves(change: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """Return a copy of `tree` in which each leaf is replaced by `change(path, leaf)`.

    Args:
        change: returns the new leaf for a path and an old leaf. A path looks like `['labels'][0]`.
        tree: nested in any way.
        path: path of `tree` itself.
    """

    def leaf(keys: Any, value: Any) -> Any:
        here = path + keystr(keys)
        if isinstance(value, Mapping):  # one that torch does not know, such as the batches of transformers
            items = {key: map_leaves(change, item, f"{here}[{key!r}]") for key, item in value.items()}
            return type(value)(items)  # type: ignore[call-arg]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _map_fields(change, value, here)
        if isinstance(value, list | tuple):  # a subclass, which torch does not know
            return _like(value, [map_leaves(change, v, f"{here}[{i}]") for i, v in enumerate(value)])
        return change(here, value)

    return tree_map_with_path(leaf, tree)


def _map_fields(change: Callable[[str, Any], Any], value: Any, path: str) -> Any:
    changed = copy.copy(value)
    for field in dataclasses.fields(value):
        item = map_leaves(change, getattr(value, field.name), f"{path}.{field.name}")
        object.__setattr__(changed, field.name, item)  # a frozen dataclass refuses `setattr`
    return changed


def _like(value: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    """Return a sequence with these items, and with the class and attributes of `value`.

    The constructor of the class may take anything, so it is not called.
    """
    kind: Any = type(value)
    if hasattr(kind, "n_sequence_fields"):  # one that C code made, such as `time.struct_time`
        return kind(items)
    made: Any
    if isinstance(value, tuple):
        made = tuple.__new__(kind, items)
    else:
        made = list.__new__(kind)
        list.extend(made, items)
    if hasattr(value, "__dict__"):
        vars(made).update(vars(value))
    return made


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return a copy of `tree` in which each tensor is replaced by `change(tensor)`."""
    return map_leaves(lambda _, leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in `tree`, in the order of `map_tensors`."""
    return list(_tensors_in(tree))


def operands(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments or results, which are nested only in sequences."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += operands(value)
    return found


def _tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in `tree`. Unlike `map_tensors`, this makes no new containers."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf
            continue
        for item in _items(leaf):
            yield from _tensors_in(item)


def _items(leaf: Any) -> Iterable[Any]:
    """Return the items of a container that torch does not know."""
    if isinstance(leaf, Mapping):
        return leaf.values()
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
    return leaf if isinstance(leaf, list | tuple) else ()
