"""Gradients that autograd has accumulated in a parameter at rest, and that must be moved to the store."""

from __future__ import annotations

from typing import Any

import torch

from headwater.core.recorder import RECORDER

_GRAD: Any = torch.Tensor.grad
"""The attribute of torch; `param.grad` of a parameter at rest reads the store."""


def take_accumulated(param: torch.Tensor) -> torch.Tensor | None:
    """Remove the gradient that autograd has accumulated from a parameter, and return it.

    The result is `None` if the parameter was frozen after the forward: autograd drops its gradient, but calls
    the hooks.
    """
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = _GRAD.__get__(param)
        _GRAD.__set__(param, None)
    return gradient


def collect_left(param: Any) -> None:
    """Move a gradient that Ctrl-C has left in a parameter to the store.

    Autograd first adds a gradient to the parameter, and then calls the hook that moves it to the store. If
    Ctrl-C was pressed meanwhile, the exception is raised before the first line of the hook.

    Args:
        param: a parameter at rest.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if _GRAD.__get__(param) is None:
            return
    if param.home.store.in_backward is not None:  # the interrupted step is lost
        take_accumulated(param)
        return
    lane = RECORDER.lane()
    before = lane.work
    next(iter(param._post_accumulate_grad_hooks.values()))(param)  # the hook of the engine is the first
    lane.switch(before)
