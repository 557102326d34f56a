"""Parameters that a program makes of tensors at rest.

[Note: new parameters]
`nn.Parameter(tensor)` shares the memory of the tensor, but a tensor at rest has no such memory. So the new
parameter is a copy, and its attribute `taken_from` refers to the original. In plain PyTorch the two would be
tied, so a model with both of them is refused. `nn.Parameter.__new__` calls `detach`, expects a tensor of the
same class, and sets `_is_param`; at that moment the copy becomes a plain parameter.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import nn


def _become_parameter(tensor: torch.Tensor, value: bool) -> None:
    tensor.__class__ = nn.Parameter


becomes_parameter_when_marked = property(lambda tensor: False, _become_parameter)
"""The attribute `_is_param` of a tensor at rest; see [Note: new parameters]."""


def new_parameter(value: Any, source: torch.Tensor) -> torch.Tensor:
    """Return a copy of `value`. The caller, `nn.Parameter(value)`, turns the copy into a plain parameter.

    Until then the copy has the class of `value`; see [Note: new parameters].

    Args:
        value: a parameter at rest, or a view of one.
        source: that parameter.
    """
    new: Any = value.selection(value.home.read()).detach()
    new.__class__ = type(value)
    new.taken_from = source
    return cast(torch.Tensor, new)


def becomes_parameter() -> bool:
    """True if the caller, a `__torch_function__`, runs the `detach` of `nn.Parameter(tensor)`."""
    # The frames are those of the caller, of the wrapper that `uncompiled` has made, and of `nn.Parameter`.
    return sys._getframe(3).f_code is nn.Parameter.__new__.__code__
