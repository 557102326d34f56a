"""The attributes that a user's class adds to optimizer objects, and their comparison."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

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
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.0)))


def is_same(one: Any, other: Any) -> bool:
    """True if two attributes are one object, or equal values of plain types. Other objects may change."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    return isinstance(one, _PLAIN) and bool(one == other)


def copied(value: Any) -> Any:
    """Return a copy of an attribute that does not change if its tensors or containers change later."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    if type(value) is dict:
        return {key: copied(item) for key, item in value.items()}
    return copy.copy(value) if isinstance(value, dict | list | set) else value
