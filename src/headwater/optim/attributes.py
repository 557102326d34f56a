"""The attributes that a user's class adds to optimizer objects, and their comparison."""

from __future__ import annotations

import copy
from collections import deque
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from headwater.core.foreign import keeps_state, slots_of

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

_WITH_PARAMETERS = (torch.nn.Module, torch.optim.Optimizer, LRScheduler)
"""Classes of objects that are not copied, because they refer to the parameters of the user."""

_DEEPEST = 4
"""Number of references that a copy follows: to a list, an object in it, its dictionary, a list in it."""

_LARGEST = 1000
"""Larger containers are not copied."""

_SET_BY_TORCH = frozenset({"step", "found_inf", "grad_scale", "_opt_called", "_step_supports_amp_scaling"})
"""Attributes that schedulers and `GradScaler` set on any optimizer."""


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer object that neither torch nor this package has set."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _of_torch() and name not in _SET_BY_TORCH and not name.startswith("_headwater")
    }


@cache
def _of_torch() -> frozenset[str]:
    """Return the names of the attributes that every optimizer of torch has."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.0)))


def is_same(one: Any, other: Any, compared: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """True if two attributes are one object or have equal content.

    Args:
        one: an attribute.
        other: another one, or a copy.
        compared: identities of the pairs that the callers compare. Objects may refer to each other.
    """
    if one is other or (id(one), id(other)) in compared:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray | np.generic):
        return bool(one.dtype == other.dtype and np.array_equal(one, other))
    if isinstance(one, _PLAIN):
        return bool(one == other)
    if isinstance(one, set | frozenset):
        return bool(one == other)
    compared |= {(id(one), id(other))}
    if isinstance(one, list | tuple | deque):
        if len(one) != len(other):
            return False
        if not all(is_same(*pair, compared) for pair in zip(one, other, strict=True)):
            return False
    elif isinstance(one, dict):
        if one.keys() != other.keys():
            return False
        if not all(is_same(value, other[key], compared) for key, value in one.items()):
            return False
    elif not _is_copied(one):
        return False
    mine, theirs = _attributes_of(one), _attributes_of(other)
    if mine.keys() != theirs.keys():
        return False
    return all(is_same(value, theirs[name], compared) for name, value in mine.items())


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those in slots."""
    slots = {slot.__name__: slot for slot in slots_of(type(value)) if hasattr(value, slot.__name__)}
    return {**getattr(value, "__dict__", {}), **{name: slot.__get__(value) for name, slot in slots.items()}}


def copied(value: Any, depth: int = _DEEPEST, made: dict[int, Any] | None = None) -> Any:
    """Return a copy of an attribute or an option, which later changes of the original leave as it is.

    Tensors, arrays, containers and objects of a user's classes are copied, and what they contain. Other
    objects are returned themselves: functions, modules, parameters, containers of more than 1,000 items.

    Args:
        value: the attribute.
        depth: number of references to follow.
        made: the copies that this call has made, by the identity of the original.
    """
    if isinstance(value, _PLAIN):
        return value
    made = {} if made is None else made
    if id(value) not in made:
        made[id(value)] = value  # an object may refer to itself through others that are not copied
        made[id(value)] = _copy_of(value, depth, made)
    return made[id(value)]


def _copy_of(value: Any, depth: int, made: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, torch.nn.Parameter) else value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if depth == 0 or not _is_copied(value):
        return value
    if type(value) is tuple:
        return tuple(copied(item, depth - 1, made) for item in value)
    try:
        copy_ = copy.copy(value)
    except Exception:  # noqa: BLE001 - a user's class can raise anything; the object is then used itself
        return value
    if copy_ is value:  # such as the member of an enumeration
        return value
    made[id(value)] = copy_
    if isinstance(copy_, list | deque):
        for index, item in enumerate(value):
            copy_[index] = copied(item, depth - 1, made)
    elif isinstance(copy_, dict):
        for key, item in value.items():
            dict.__setitem__(copy_, key, copied(item, depth - 1, made))
    for name, item in _attributes_of(copy_).items():
        object.__setattr__(copy_, name, copied(item, depth - 1, made))  # the class may be frozen
    return copy_


def _is_copied(value: Any) -> bool:
    """True if an object may be copied: it is a container of a usual size, or of a user's class.

    The end of a copy calls `__del__`, which may close a file that the original still needs.
    """
    if hasattr(type(value), "__del__"):
        return False
    if isinstance(value, list | tuple | deque | dict | set):
        return len(value) <= _LARGEST
    return keeps_state(value) and not isinstance(value, _WITH_PARAMETERS)
