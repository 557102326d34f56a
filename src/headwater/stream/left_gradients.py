"""Gradients that autograd has accumulated in a parameter at rest, and that must be moved to the store.

[Note: gradients of frozen parameters]
A plan has no memory for the gradient and the optimizer state of a parameter that was frozen when the plan was
made. Such a parameter can still get a gradient: the loop assigns one, or unfreezes the parameter and calls
only a part of the model, which makes no new plan. Then it becomes a plain parameter, and the next call of the
model makes a plan that trains it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from headwater.core.interrupts import uninterrupted
from headwater.core.recorder import RECORDER

_TRAINED = "_headwater_trained"

GRAD: Any = torch.Tensor.grad
"""The attribute of torch; `param.grad` of a parameter at rest reads the store."""


def take_accumulated(param: torch.Tensor) -> torch.Tensor | None:
    """Remove the gradient that autograd has accumulated from a parameter, and return it.

    The result is `None` if the parameter was frozen after the forward: autograd drops its gradient, but calls
    the hooks.
    """
    with torch._C.DisableTorchFunctionSubclass():
        gradient: torch.Tensor | None = GRAD.__get__(param)
        GRAD.__set__(param, None)
    return gradient


@uninterrupted
def give_to_frozen(param: Any, gradient: torch.Tensor) -> None:
    """Turn a parameter that the plan does not train into a plain one with this gradient.

    See [Note: gradients of frozen parameters].
    """
    setattr(param, _TRAINED, True)
    param.home.leave(param.device)
    GRAD.__set__(param, gradient.to(param.dtype))  # under autocast it may have 16 bits


@uninterrupted
def _collect_from_frozen(param: Any) -> None:
    gradient = take_accumulated(param)
    assert gradient is not None, "the caller has seen it"
    give_to_frozen(param, gradient)


def is_trained(param: torch.Tensor) -> bool:
    """True if a plan must have memory for the gradient of a parameter."""
    if param.requires_grad or hasattr(param, _TRAINED):
        return True
    # It may have been frozen after a backward in plain PyTorch.
    return not hasattr(param, "home") and param.grad is not None


def forget_trained(params: Iterable[torch.Tensor]) -> None:
    """Forget which frozen parameters got gradients: a new plan need not have memory for them."""
    for param in params:
        vars(param).pop(_TRAINED, None)


def collect_left(param: Any) -> None:
    """Move a gradient that autograd has left in a parameter to the store.

    Ctrl-C leaves one there, and so does a plan that does not train the parameter; see [Note: gradients of
    frozen parameters], after which the parameter is a plain one.

    Autograd first adds a gradient to the parameter, and then calls the hook that moves it to the store. If
    Ctrl-C was pressed meanwhile, the exception is raised before the first line of the hook.

    Args:
        param: a parameter at rest.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if GRAD.__get__(param) is None:
            return
    if param.home.store.in_backward is not None:  # the interrupted step is lost
        take_accumulated(param)
        return
    if not param.home.spec.requires_grad:
        _collect_from_frozen(param)
        return
    lane = RECORDER.lane()
    before = lane.work
    next(iter(param._post_accumulate_grad_hooks.values()))(param)  # the hook of the engine is the first
    lane.switch(before)
