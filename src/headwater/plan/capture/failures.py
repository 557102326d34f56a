"""Errors of a failed dry run: the cause with its place, the shapes, and a remedy."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import nn

from headwater.core.errors import ModelError
from headwater.core.module_parameters import named_parameters_of
from headwater.plan.capture.place import Locator, Place, first_sentence, module_text, tensor_text

_BACKWARD = torch.Tensor.backward.__code__


class RefusedCall(Exception):
    """A call of an operator that works on shapes alone, but would fail on real tensors."""


def error_with_place(error: Exception, model: nn.Module, locator: Locator) -> ModelError | None:
    """Return the error of a dry run of `model` with its place; `None` if the user's code did not cause it."""
    frames = list(traceback.walk_tb(error.__traceback__))
    place = locator.find(reversed(frames))
    reason = first_sentence(error)
    what = reason if isinstance(error, RefusedCall) else f"{type(error).__name__}: {reason}"
    # An error in backward has no place, because backward runs no code of the user. Any other error without a
    # place is a fault of this package.
    if place is None and all(frame.f_code is not _BACKWARD for frame, _ in frames):
        return None
    if place is None:
        remedy = "compute the loss with operators that torch can differentiate"
        return ModelError(what, where="the backward", remedy=remedy)
    tensors = list(place.tensors)
    if place.module is not None:
        params = named_parameters_of(model.get_submodule(place.module), recurse=False)
        tensors += [f"{name} {tensor_text(param)}" for name, param in params]
    where = f"{place}; {', '.join(tensors)}" if tensors else str(place)
    return ModelError(what, where=where, remedy=_remedy(reason, place))


def _remedy(reason: str, place: Place) -> str:
    if ".numpy()" in reason:
        return "write this with torch operators: a dry run has shapes, but no values"
    user = "the loss function" if place.module is None else module_text(place.module)
    return f"pass {user} tensors of the shape and dtype that it expects, or change its code"


def check_loss(loss: Any) -> None:
    """Raise if backward cannot begin with `loss`.

    Raises:
        ModelError: if `loss` is not one differentiable number.
    """
    where = "the loss"
    if not isinstance(loss, torch.Tensor):
        raise ModelError(
            f"expected a tensor as the loss, got a {type(loss).__name__}",
            where=where,
            remedy="pass loss_function, which returns the loss of a batch as a tensor",
        )
    if loss.numel() != 1:
        raise ModelError(
            f"expected one number as the loss, got {tensor_text(loss)}",
            where=where,
            remedy="return one number, for example the mean of the losses",
        )
    if not loss.requires_grad:
        raise ModelError(
            f"the loss ({tensor_text(loss)}) depends on no trainable parameter",
            where=where,
            remedy="compute it from the model's output, without detach, no_grad or argmax in between",
        )
