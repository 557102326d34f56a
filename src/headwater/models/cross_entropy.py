"""Cross-entropy of given logits, by blocks of rows, with the bits of torch's cross-entropy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.core.dry_run import counts_costs
from headwater.core.errors import ConfigError, RunError
from headwater.core.modes import is_transformed
from headwater.core.plain import is_plain
from headwater.models.loss import block_starts

_NUMBERS = {"none": 0, "mean": 1, "sum": 2}
"""The numbers by which operators of torch know reductions."""

_BLOCK_BYTES = {"cpu": 4 << 20, "cuda": 128 << 20}
"""Target size of the fp32 rows that are computed at once. On a CPU they stay in the cache."""

_LEFT_OUT = -1
"""The target of an ignored row, in the sum over all rows."""


def cross_entropy(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """Return `torch.nn.functional.cross_entropy(logits.float(), targets)`: the same bits in less memory.

    torch keeps the logits of all rows in fp32 and their logarithmic softmax, and computes gradients for both.
    Here only a block of rows is in fp32 at a time, and the backward computes the softmax of each block again.
    Each row is computed by the operators that torch uses, and the losses of all rows are added by torch's
    operator. Only the gradient of a sum of this loss and a function of its gradient may differ in the last
    digits. Where blocks are not supported (in `torch.func` and `torch.compile`, for targets that are
    probabilities, and for other shapes), this is torch's function.

    Args:
        logits: logits, [rows, classes], of any floating-point dtype.
        targets: class indices, [rows].
        ignore_index: target of rows that do not count.
        reduction: whether to return the mean or the sum of the rows' losses.

    Returns:
        The loss, a scalar in fp32.

    Raises:
        IndexError: if a target is not a class.
        ConfigError: if the reduction is not `mean` or `sum`.
        RunError: in the backward, if the logits were changed since the forward.
    """
    if reduction not in ("mean", "sum"):
        raise ConfigError(
            f"expected reduction 'mean' or 'sum', got {reduction!r}",
            where="cross_entropy",
            remedy="use torch.nn.functional.cross_entropy, which has other reductions",
        )
    if not _can_divide(logits, targets):
        return F.cross_entropy(logits.float(), targets, ignore_index=ignore_index, reduction=reduction)
    loss: Tensor = _CrossEntropy.apply(logits, targets, ignore_index, reduction)  # type: ignore[no-untyped-call]
    return loss


def _can_divide(logits: Tensor, targets: Tensor) -> bool:
    """True if blocks are supported and save memory."""
    return (
        logits.dim() == 2
        and targets.dim() == 1
        and len(logits) == len(targets) > _block_rows(logits)
        and not targets.is_floating_point()
        and not torch.overrides.has_torch_function((logits, targets))
        and not torch.compiler.is_compiling()
        and not is_transformed()
    )


@final
class _CrossEntropy(torch.autograd.Function):
    """The loss and its gradient. It saves the logits in their own dtype."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
        losses = torch.empty_like(targets, dtype=torch.float32)
        for rows in _blocks(logits):
            log_softmax = torch.log_softmax(logits[rows].float(), -1)
            losses[rows] = _row_losses(log_softmax, targets[rows], ignore_index)
        # torch's sum over all rows: of one class, whose negative logarithms are the losses.
        only_class = torch.zeros_like(targets).masked_fill_(targets == ignore_index, _LEFT_OUT)
        loss, total = torch.ops.aten.nll_loss_forward(
            -losses.unsqueeze(1), only_class, None, _NUMBERS[reduction], _LEFT_OUT
        )
        ctx.save_for_backward(logits, targets, total, losses)
        ctx.ignore_index, ctx.reduction = ignore_index, reduction
        return loss  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, total, losses = ctx.saved_tensors
        if torch.is_grad_enabled():  # the caller will differentiate this gradient
            loss = F.cross_entropy(
                logits.float(), targets, ignore_index=ctx.ignore_index, reduction=ctx.reduction
            )
            (grad_logits,) = torch.autograd.grad(loss, logits, gradient, create_graph=True)
            return grad_logits, None, None, None
        grad_logits, losses_again = torch.empty_like(logits), torch.empty_like(losses)
        for rows in _blocks(logits):
            log_softmax = torch.log_softmax(logits[rows].float(), -1)
            losses_again[rows] = _row_losses(log_softmax, targets[rows], ctx.ignore_index)
            of_losses = torch.ops.aten.nll_loss_backward(
                gradient,
                log_softmax,
                targets[rows],
                None,
                _NUMBERS[ctx.reduction],
                ctx.ignore_index,
                total,
            )
            grad_logits[rows] = torch.ops.aten._log_softmax_backward_data(
                of_losses, log_softmax, -1, torch.float32
            )
        _refuse_changes(losses, losses_again)
        return grad_logits, None, None, None


def _row_losses(log_softmax: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Return the loss of each row, which is 0 for ignored rows."""
    losses: Tensor = torch.ops.aten.nll_loss_forward(
        log_softmax, targets, None, _NUMBERS["none"], ignore_index
    )[0]
    return losses


def _refuse_changes(before: Tensor, after: Tensor) -> None:
    """Raise if the losses of rows changed since the forward. On a GPU this would wait for the computation.

    torch's own loss does not read the logits again, so with it such changes have no effect. torch notices
    changes itself, except those through `data` and NumPy arrays.
    """
    if is_plain(before) and not counts_costs() and not torch.allclose(before, after, 0, 0, equal_nan=True):
        raise RunError(
            "the logits were changed between the forward and the backward of their loss",
            where="cross_entropy",
            remedy="change a copy: logits.detach().clone()",
        )


def _blocks(logits: Tensor) -> Iterator[slice]:
    block = _block_rows(logits)
    for start in block_starts(len(logits), block, first_chunk=True):
        yield slice(start, start + block)


def _block_rows(logits: Tensor) -> int:
    block_bytes = _BLOCK_BYTES.get(logits.device.type, _BLOCK_BYTES["cuda"])
    return max(1, block_bytes // (4 * max(logits.shape[1], 1)))
