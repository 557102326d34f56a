"""Cross-entropy over a large vocabulary, fused with the output projection and computed in chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headwater.core.buffers import large_zeros
from headwater.core.dry_run import counts_costs
from headwater.models.workspace import WorkspacePool, is_plain

WORKSPACES = WorkspacePool()
"""Memory of the logits of one chunk, between calls."""

_CHUNK_BYTES = 64 << 20
"""Target size of the logits of one chunk. Every chunk reads and writes the whole gradient of the weight, so
a much smaller one is bound by memory; a much larger one leaves the cache."""

_MAX_HALF_CHUNKS = 16
"""Most chunks of a 16-bit product. The gradient of the weight is rounded to 16 bits after each of them, which
at 16 costs about as much accuracy as the products themselves (relative error 0.005 against 0.003), at 64
three times as much; summing in fp32 would make that product three times slower on a CPU."""

_BLOCK_BYTES = 16 << 20
"""Target size of the fp32 rows whose softmax is taken at once on the CPU: small enough to stay in cache from
pass to pass, large enough that few passes wait for a compute thread that another process has displaced."""

_ROW_ALIGNMENT = 64
"""Elements to which rows of logits are padded: with rows that start on a cache line the matrix product is
up to 1.4 times faster (50,257 is odd)."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    row_weights: Tensor,
    *,
    softcap: float | None = None,
    chunk_rows: int | None = None,
) -> Tensor:
    """Weighted sum of the cross-entropies of `softmax(hidden @ weight.T + bias)` against `targets`.

    The logits of more than `chunk_rows` rows are never held: the gradients are computed together with the
    loss, chunk by chunk, as in Liger Kernel (arXiv:2410.10989), and only scaled in the backward. Matrix
    products run in the dtype of `weight` (or of autocast), the softmax in fp32 (fp64 for fp64).

    Args:
        hidden: [rows, width].
        weight: [vocab, width].
        bias: [vocab], or `None`.
        targets: [rows], class indices; not looked at where the row's weight is 0.
        row_weights: [rows], the factor of each row in the sum, already normalised.
        softcap: logits `z` become `c·tanh(z/c)` (arXiv:2408.00118, section 2).
        chunk_rows: rows whose logits are held at once; derived from their size where `None`.

    Returns:
        The loss, a scalar in fp32 (fp64 for fp64).
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    rows, vocab = hidden.shape[0], weight.shape[0]
    layout = _layout(rows, vocab, weight.dtype, device, chunk_rows)
    targets = targets.long().masked_fill(row_weights == 0, 0)
    with torch.autocast(device, enabled=False):
        loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, row_weights, softcap, layout, torch.is_grad_enabled()
        )
    return loss


@torch.no_grad()
def row_cross_entropies(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, softcap: float | None = None
) -> Tensor:
    """The cross-entropy of each row, without gradients and without the logits of all rows.

    Args:
        hidden: [rows, width].
        weight: [vocab, width].
        bias: [vocab], or `None`.
        targets: [rows], class indices.
        softcap: see `linear_cross_entropy`.

    Returns:
        Losses [rows] in fp32 (fp64 for fp64).
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    layout = _layout(hidden.shape[0], weight.shape[0], weight.dtype, device, None)
    losses = hidden.new_empty(len(hidden), dtype=_softmax_dtype(weight.dtype))
    with torch.autocast(device, enabled=False):
        pass_ = _Pass(hidden, weight, bias, softcap, layout, (False, False, False))
        pass_.run(targets.long(), torch.ones_like(losses), losses)
    return losses


def plain_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    row_weights: Tensor,
    *,
    softcap: float | None = None,
) -> Tensor:
    """The same loss by PyTorch's own operators, with the logits of all rows in memory."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(_softmax_dtype(logits.dtype))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits, targets.long().masked_fill(row_weights == 0, 0), reduction="none")
    return (losses * row_weights).sum()


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How the rows are cut: `chunk` rows of logits at once, softmax over `block` of them at once."""

    chunk: int
    block: int
    row_stride: int


def _layout(rows: int, vocab: int, dtype: torch.dtype, device: str, chunk_rows: int | None) -> _Layout:
    stride = -(-vocab // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    if chunk_rows is None:
        chunks = -(-rows * stride * dtype.itemsize // _CHUNK_BYTES)
        chunks = min(chunks, _MAX_HALF_CHUNKS) if dtype.itemsize < 4 else chunks
        chunk_rows = -(-rows // max(chunks, 1))
    chunk = max(1, min(chunk_rows, rows))
    block = chunk if device != "cpu" else max(1, min(chunk, _BLOCK_BYTES // (4 * stride)))
    return _Layout(chunk, block, stride)


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients in one pass; the backward only scales. Saves gradients, never the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        row_weights: Tensor,
        softcap: float | None,
        layout: _Layout,
        with_gradients: bool,
    ) -> Tensor:
        wanted = tuple(with_gradients and needed for needed in ctx.needs_input_grad[:3])
        row_weights = row_weights.to(_softmax_dtype(weight.dtype))
        ctx.unit = None
        if weight.dtype == torch.float16 and any(wanted):
            # A probability times 1 / tokens underflows in fp16: the backward applies the factor instead.
            ctx.unit = row_weights.abs().amax().clamp_min(torch.finfo(row_weights.dtype).tiny)
            row_weights = row_weights / ctx.unit
        pass_ = _Pass(hidden, weight, bias, softcap, layout, wanted)
        loss = pass_.run(targets, row_weights)
        ctx.save_for_backward(pass_.grad_hidden, pass_.grad_weight, pass_.grad_bias)
        return loss if ctx.unit is None else loss * ctx.unit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_loss if ctx.unit is None else grad_loss * ctx.unit
        # Only a plain CPU tensor can be looked at for free: CUDA would wait, a fake tensor has no value.
        if type(scale) is Tensor and scale.device.type == "cpu" and scale.item() == 1:
            gradients = ctx.saved_tensors
        else:
            gradients = tuple(None if grad is None else _scaled(grad, scale) for grad in ctx.saved_tensors)
        return (*gradients, None, None, None, None, None)


def _block_starts(rows: int, block: int) -> Sequence[int]:
    """Return the first row of each block.

    A dry run that counts costs takes the first and the last block: no operator of a block has FLOPs, and all
    blocks between these two are equal. With long sequences and large vocabularies there are thousands.
    """
    starts = range(0, rows, block)
    return (starts[0], starts[-1]) if counts_costs() and len(starts) > 2 else starts


def _scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    if gradient.device.type == "cpu":  # multiplies by the unrounded scalar
        return gradient * scale
    return (gradient.to(scale.dtype) * scale).to(gradient.dtype)


class _Pass:
    """One pass over the rows: the loss, and the gradients that are wanted."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        layout: _Layout,
        wanted: tuple[bool, ...],
    ) -> None:
        self.hidden, self.weight, self.bias, self.layout = hidden, weight, bias, layout
        self.softcap = softcap
        self.any_wanted = any(wanted)
        empty = torch.empty_like if len(hidden) else torch.zeros_like
        self.grad_hidden = empty(hidden) if wanted[0] else None
        self.grad_weight = None
        if wanted[1]:
            self.grad_weight = large_zeros(weight.shape, weight.dtype) if is_plain(weight) else empty(weight)
        self.grad_bias = None
        if bias is not None and wanted[2]:
            self.grad_bias = torch.zeros_like(bias, dtype=_softmax_dtype(bias.dtype))

    def run(self, targets: Tensor, row_weights: Tensor, row_losses: Tensor | None = None) -> Tensor:
        """The loss; afterwards the gradients are filled, and the loss of each row without its weight."""
        rows, vocab, layout = len(self.hidden), len(self.weight), self.layout
        compute = row_weights.dtype
        same = compute == self.weight.dtype
        loss = row_weights.new_zeros(())
        with (
            WORKSPACES.borrow(self.weight, self.weight.dtype, layout.chunk * layout.row_stride) as chunk,
            WORKSPACES.borrow(self.weight, compute, 0 if same else layout.block * vocab) as scratch,
        ):
            for start in range(0, rows, layout.chunk):
                part = slice(start, min(start + layout.chunk, rows))
                logits = chunk.view(layout.chunk, layout.row_stride)[: part.stop - start, :vocab]
                torch.mm(self.hidden[part], self.weight.t(), out=logits)
                for start_row in _block_starts(len(logits), layout.block):
                    block = logits[start_row : start_row + layout.block]
                    rows_here = slice(part.start + start_row, part.start + start_row + len(block))
                    block_weights = row_weights[rows_here].unsqueeze(1)
                    wide = block if same else scratch[: block.numel()].view(block.shape).copy_(block)
                    losses = self._softmax(wide, targets[rows_here].unsqueeze(1), block_weights)
                    loss += (losses * block_weights).sum()
                    if row_losses is not None:
                        row_losses[rows_here] = losses.squeeze(1)
                    if self.any_wanted and not same:
                        block.copy_(wide)
                self._products(logits, part)
        if self.bias is not None and self.grad_bias is not None:
            self.grad_bias = self.grad_bias.to(self.bias.dtype)
        return loss

    def _softmax(self, logits: Tensor, targets: Tensor, row_weights: Tensor) -> Tensor:
        """Losses [rows, 1] of a block [rows, vocab]; its logits become the gradient of the loss by them."""
        if self.bias is not None:
            logits += self.bias
        slope = self._cap(logits)
        peak = logits.amax(1, keepdim=True)
        at_target = logits.gather(1, targets)
        total = logits.sub_(peak).exp_().sum(1, keepdim=True)
        losses: Tensor = total.log() + peak - at_target
        if self.any_wanted:
            logits.mul_(row_weights / total).scatter_add_(1, targets, -row_weights)
            if slope is not None:
                logits *= slope
            if self.grad_bias is not None:
                self.grad_bias += logits.sum(0)
        return losses

    def _cap(self, logits: Tensor) -> Tensor | None:
        """Apply the soft cap in place; its derivative [rows, vocab], `None` where there is no cap."""
        if self.softcap is None:
            return None
        logits.div_(self.softcap).tanh_()
        slope = 1 - logits.square() if self.any_wanted else None
        logits.mul_(self.softcap)
        return slope

    def _products(self, grad_logits: Tensor, part: slice) -> None:
        if self.grad_hidden is not None:
            torch.mm(grad_logits, self.weight, out=self.grad_hidden[part])
        if self.grad_weight is not None:
            first = part.start == 0
            self.grad_weight.addmm_(grad_logits.t(), self.hidden[part], beta=0 if first else 1)
