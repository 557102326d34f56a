"""Calls of a model inside transforms of `torch.func`."""

from __future__ import annotations

import torch
from torch._C._functorch import TransformType, get_interpreter_stack

from headwater.core.errors import StreamError

_DERIVATIVES = (TransformType.Grad, TransformType.Jvp)


def in_transform() -> bool:
    """True inside any transform of `torch.func`, also `vmap`. Its tensors are not valid afterwards."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_derivative() -> bool:
    """True inside `torch.func.grad`, `vjp`, `jvp` and functions that use them; false inside only `vmap`."""
    if not in_transform():
        return False
    return any(interpreter.key() in _DERIVATIVES for interpreter in get_interpreter_stack() or ())


def refuse_first_call() -> None:
    """Raise if the first call of a model, which makes its plan, is inside `grad`, `vjp` or `jvp`.

    Raises:
        StreamError: if the call is inside one of these.
    """
    if in_derivative():
        raise StreamError(
            "the first call of the model is inside of torch.func, where the dry run cannot see the tensors",
            remedy="first call the model once outside of torch.func, with a batch of this size",
        )


def refuse_moving_weights() -> None:
    """Raise if a model with fewer slabs than stages is called inside `grad`, `vjp` or `jvp`.

    These transforms wrap the weights and read them later, when their memory holds other weights.

    Raises:
        StreamError: if the call is inside one of these.
    """
    if in_derivative():
        raise StreamError(
            "torch.func.grad, vjp, jvp and functions that use them need every weight in memory at once, but "
            "this plan has fewer slabs than stages",
            remedy="set num_slabs to the number of stages or more, or tier to memory without num_slabs; or "
            "use torch.autograd.grad or torch.autograd.forward_ad",
        )
