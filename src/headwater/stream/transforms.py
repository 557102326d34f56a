"""Calls of a model inside transforms of `torch.func`, and inside contexts that copy saved tensors."""

from __future__ import annotations

import torch
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import graph

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
    """Raise if the first call of a model, which makes its plan, is inside a transform of `torch.func`.

    Raises:
        StreamError: if the call is inside a transform.
    """
    if in_transform():
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


def refuse_recorded_read(name: str) -> None:
    """Raise if a weight that requires a gradient is read inside a transform, outside of its module's forward.

    Args:
        name: the weight.

    Raises:
        StreamError: if the read is inside a transform: torch cannot record reads from a store there.
    """
    if in_transform():
        raise StreamError(
            "a weight that requires a gradient is read inside of torch.func, outside of its module's forward",
            where=name,
            remedy="read it before, and use the copy inside: weight = layer.weight.clone()",
        )


def refuse_copies_of_saved_weights() -> None:
    """Raise if torch is to copy saved tensors before they change: it does not see changes of stored weights.

    Raises:
        StreamError: if a forward with gradients is inside of such a context.
    """
    if torch.is_grad_enabled() and graph._allow_mutation_on_saved_tensors_enabled:
        raise StreamError(
            "expected a forward outside of torch.autograd.graph.allow_mutation_on_saved_tensors, which does "
            "not see changes of streamed weights: the backward would use the new weights",
            remedy="run the forward and its backward outside of this context, and change weights after the "
            "backward",
        )
