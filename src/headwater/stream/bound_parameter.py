"""The class of bound parameters that notices writes to `param.data`."""

from __future__ import annotations

import functools
import types
from typing import Any, cast

import torch
from torch import nn

_DATA: Any = torch.Tensor.data

_TAKEN = "taken_data"
"""The attribute of a bound parameter that lists the tensors that `param.data` has returned."""


@functools.cache
def watched_class(cls: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return a subclass of `cls` that remembers each tensor that `param.data` returns.

    Such a tensor has its own version counter, so a change of it does not change that of the parameter.
    """
    body = {"data": property(_data, _DATA.__set__), "__module__": cls.__module__, "__doc__": cls.__doc__}
    made = types.new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(body))
    return cast(type[nn.Parameter], made)


def _data(param: Any) -> torch.Tensor:
    data: torch.Tensor = _DATA.__get__(param)
    if hasattr(param, "home"):  # copies of the parameter have this class too
        vars(param).setdefault(_TAKEN, []).append(data)
    return data


def changed_by_data(param: torch.Tensor) -> bool:
    """True if a tensor that `param.data` has returned was changed in place. Forget these tensors."""
    return any(data._version for data in vars(param).pop(_TAKEN, ()))
