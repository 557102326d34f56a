"""The losses of the transformers library over a large vocabulary, without all logits in fp32."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from headwater.models.cross_entropy import cross_entropy

Loss = Callable[..., Tensor]

_OF_VOCABULARY = ("ForCausalLM", "ForMaskedLM")
"""Kinds of losses, as the library names them, that compute the cross-entropy over a vocabulary."""


def divide_losses(model: nn.Module) -> None:
    """Make models of the transformers library compute their losses by blocks of tokens.

    The library casts the logits of all tokens to fp32, and keeps their logarithmic softmax for the backward.
    By blocks, the loss and its gradients have the same bits. Losses that the user has set are left as they
    are.

    Args:
        model: changed in place: its modules that are models of the library, if any.
    """
    losses = sys.modules.get("transformers.loss.loss_utils")
    models = sys.modules.get("transformers.modeling_utils")
    if losses is None or models is None:
        return
    for module in model.modules():
        if isinstance(module, models.PreTrainedModel) and "_loss_function" not in module.__dict__:
            loss = _loss_of(module, losses.LOSS_MAPPING)
            if loss is not None and type(module).loss_function is models.PreTrainedModel.loss_function:
                module._loss_function = functools.partial(_divided, loss)


def join_losses(model: nn.Module) -> None:
    """Undo `divide_losses`."""
    for module in model.modules():
        loss = module.__dict__.get("_loss_function")
        if isinstance(loss, functools.partial) and loss.func is _divided:
            del module._loss_function


def _loss_of(module: Any, known: Mapping[str, Loss]) -> Loss | None:
    """Return the library's loss of a model if it can be divided, otherwise `None`."""
    kind = getattr(module, "loss_type", None)
    kind = kind if kind in known else "ForCausalLM"  # as the library does
    return known[kind] if kind in _OF_VOCABULARY and _is_understood(known[kind]) else None


@functools.cache
def _is_understood(loss: Loss) -> bool:
    """True if this version of the library's loss works with postponed logits."""
    with _disable_current_modes():  # such as fake tensors
        logits = torch.tensor([[[1.0, 2.0, 4.0], [3.0, 0.0, 5.0]]], device="cpu")
        labels = torch.tensor([[2, 1]], device="cpu")
        try:
            return torch.equal(_divided(loss, logits, labels, 3), loss(logits, labels, 3))
        except (AttributeError, TypeError):  # it uses logits in a way that `PostponedLogits` lacks
            return False


def _divided(loss: Loss, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the library's loss. Its cross-entropy is computed by blocks where that saves memory."""
    return loss(PostponedLogits(logits), *args, **kwargs)


@final
class PostponedLogits:
    """Logits whose cast to fp32 waits until an operator other than cross-entropy needs all of them.

    It has those methods of a tensor that the library's losses call.

    Attributes:
        logits: the logits, of any shape and dtype.

    Args:
        logits: the logits.
        is_wide: true if `float` was called.
    """

    def __init__(self, logits: Tensor, *, is_wide: bool = False) -> None:
        self.logits = logits
        self._is_wide = is_wide

    @property
    def is_fp32(self) -> bool:
        """True if the values are in fp32."""
        return self._is_wide or self.logits.dtype == torch.float32

    @property
    def device(self) -> torch.device:
        """The device of the logits."""
        return self.logits.device

    def float(self) -> PostponedLogits:
        """Return the logits in fp32, once they are computed."""
        return PostponedLogits(self.logits, is_wide=True)

    def view(self, *shape: int) -> PostponedLogits:
        """Return the logits in another shape."""
        # The result of a cast is contiguous, but the logits may be a slice, which has no such view.
        return PostponedLogits(self.logits.reshape(*shape), is_wide=self._is_wide)

    def computed(self) -> Tensor:
        """Return the logits as a tensor."""
        return self.logits.float() if self._is_wide else self.logits

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        return function(*map(_computed, args), **{name: _computed(value) for name, value in kwargs.items()})


def _computed(value: Any) -> Any:
    return value.computed() if isinstance(value, PostponedLogits) else value


def _cross_entropy(
    logits: PostponedLogits,
    targets: Tensor,
    *,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    **others: Any,
) -> Tensor:
    """Return torch's cross-entropy, by blocks if the options allow it. torch passes all options."""
    is_usual = label_smoothing == 0 and all(value is None for value in others.values())
    if is_usual and logits.is_fp32 and reduction in ("mean", "sum"):
        return cross_entropy(logits.logits, targets, ignore_index=ignore_index, reduction=reduction)
    return F.cross_entropy(
        logits.computed(),
        targets,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        **others,
    )
