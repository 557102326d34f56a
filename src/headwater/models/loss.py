"""Cross-entropy over a large vocabulary, fused with the output projection and computed in chunks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwater.core.buffers import large_empty, large_zeros
from headwater.core.dry_run import counts_costs
from headwater.core.half_products import add_product, multiply_into
from headwater.core.plain import is_plain
from headwater.core.uncompiled import uncompiled
from headwater.models.workspace import WorkspacePool

WORKSPACES = WorkspacePool()
"""Pool that keeps the memory of the logits of one chunk between calls."""

_CHUNK_BYTES = 64 << 20
"""Target size of the logits of one chunk. Every chunk reads and writes the whole gradient of the weight, so
that much smaller chunks are limited by memory bandwidth; much larger ones do not fit into the cache."""

_MAX_HALF_CHUNKS = 16
"""Maximum number of chunks with 16-bit weights. The gradient of the weight is rounded to 16 bits after each
chunk. With 16 chunks this costs about as much accuracy as the products themselves (relative error 0.005 and
0.003), with 64 chunks three times as much. A sum in fp32 would make the product three times slower on a
CPU."""

_BLOCK_BYTES = 16 << 20
"""Target size of the fp32 rows whose softmax is computed at once on the CPU: small enough to stay in the
cache from pass to pass, large enough that few passes wait for a compute thread that another process has
displaced."""

_DEVICE_BLOCK_BYTES = 128 << 20
"""The same on a GPU: enough rows to occupy it."""

_SCALED_ELEMENTS = 1 << 24
"""Elements of a 16-bit gradient that are scaled at once in fp32."""

_ROW_ALIGNMENT = 64
"""Rows of logits are padded to a multiple of this number of elements. If every row starts on a cache line,
the matrix product is up to 1.4 times faster (a vocabulary may be odd, such as 50,257)."""


_without_compiler = functools.partial(uncompiled, reason="this loss is computed chunk by chunk in Python")


@_without_compiler
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
    """Return the weighted sum of the cross-entropies of `softmax(hidden @ weight.T + bias)` and `targets`.

    Logits of at most `chunk_rows` rows are in memory. The gradients are computed together with the loss,
    chunk by chunk, as in Liger Kernel (arXiv:2410.10989); the backward only scales them. Matrix products run
    in the dtype of `weight` (or of autocast), the softmax in fp32 (fp64 for fp64).

    Args:
        hidden: hidden states, [rows, width].
        weight: weight of the output projection, [vocab, width].
        bias: bias of the output projection, [vocab], or `None`.
        targets: class indices, [rows]; ignored where the row's weight is 0.
        row_weights: factor of each row in the sum, already normalised, [rows].
        softcap: the constant c: logits `z` become `c·tanh(z/c)` (arXiv:2408.00118, section 2).
        chunk_rows: rows whose logits are in memory at once; `None`: chosen from their size.

    Returns:
        The loss, a scalar in fp32 (fp64 for fp64).
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    rows, vocab = hidden.shape[0], weight.shape[0]
    layout = _layout(rows, vocab, weight.dtype, device, chunk_rows)
    # An ignored target may be outside of the vocabulary, such as -100, and `gather` would fail.
    targets = targets.long().masked_fill(row_weights == 0, 0)
    with torch.autocast(device, enabled=False):
        # `is_grad_enabled` is called here: within the forward of an autograd function it returns False.
        loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, row_weights, softcap, layout, torch.is_grad_enabled()
        )
    return loss


@_without_compiler
@torch.no_grad()
def row_cross_entropies(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    softcap: float | None = None,
    predicted: Tensor | None = None,
) -> Tensor:
    """Return the cross-entropy of each row, without gradients and without all logits in memory.

    Args:
        hidden: hidden states, [rows, width].
        weight: weight of the output projection, [vocab, width].
        bias: bias of the output projection, [vocab], or `None`.
        targets: class indices, [rows].
        softcap: see `linear_cross_entropy`.
        predicted: if given, filled with the most likely class of each row, int64 [rows].

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
        pass_.run(targets.long(), torch.ones_like(losses), losses, predicted)
    return losses


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The sizes of the chunks and blocks in which logits are computed.

    Attributes:
        chunk: rows whose logits are in memory at once.
        block: rows of a chunk whose softmax is computed at once.
        row_stride: elements from the start of a row of logits to the start of the next.
    """

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
    block_bytes = _BLOCK_BYTES if device == "cpu" else _DEVICE_BLOCK_BYTES
    block = max(1, min(chunk, block_bytes // (4 * stride)))
    return _Layout(chunk, block, stride)


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _LinearCrossEntropy(torch.autograd.Function):
    """Autograd function that computes loss and gradients in one pass; its backward only scales the gradients.

    It saves the gradients for the backward, not the weight.
    """

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
            # A probability times 1 / tokens would underflow in fp16. So the row weights are divided by the
            # largest one here, and the backward multiplies by it.
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
        # Only the value of a plain CPU tensor is free to read: CUDA would synchronize, a fake tensor has
        # none.
        if type(scale) is Tensor and scale.device.type == "cpu" and scale.item() == 1:
            gradients = ctx.saved_tensors
        else:
            gradients = tuple(None if grad is None else _scaled(grad, scale) for grad in ctx.saved_tensors)
        return (*gradients, None, None, None, None, None)


def block_starts(rows: int, block: int, *, first_chunk: bool) -> Sequence[int]:
    """Return the first row of each block of a chunk.

    A dry run that counts costs only visits the first and the last block of the first chunk, which has the
    most rows. The operators of a block have no FLOPs, all other blocks are equal to these or smaller, and
    there can be thousands of them.
    """
    starts = range(0, rows, block)
    if not counts_costs():
        return starts
    return (0, starts[-1])[: len(starts)] if first_chunk else ()


def _scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    if gradient.device.type == "cpu":  # the CPU kernel does not round the scalar to the gradient's dtype
        return gradient * scale
    # In pieces, since the gradient of a large vocabulary takes gigabytes in fp32.
    scaled = torch.empty_like(gradient)
    for target, source in zip(_pieces(scaled), _pieces(gradient), strict=True):
        target.copy_(source.to(scale.dtype) * scale)
    return scaled


def _pieces(gradient: Tensor) -> Sequence[Tensor]:
    pieces: Sequence[Tensor] = gradient.view(-1).split(_SCALED_ELEMENTS)
    return pieces


class _Pass:
    """One pass over all rows, which computes the loss and the requested gradients.

    Args:
        hidden: see `linear_cross_entropy`.
        weight: see `linear_cross_entropy`.
        bias: see `linear_cross_entropy`.
        softcap: see `linear_cross_entropy`.
        layout: the sizes of chunks and blocks.
        wanted: whether to compute the gradients of `hidden`, `weight` and `bias`.
    """

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
        # Without rows no chunk fills the gradients.
        empty = torch.empty_like if len(hidden) else torch.zeros_like
        self.grad_hidden = empty(hidden) if wanted[0] else None
        self.grad_weight = None
        if wanted[1]:
            large = large_empty if len(hidden) else large_zeros
            self.grad_weight = large(weight.shape, weight.dtype) if is_plain(weight) else empty(weight)
        self.grad_bias = None
        if bias is not None and wanted[2]:
            self.grad_bias = torch.zeros_like(bias, dtype=_softmax_dtype(bias.dtype))

    def run(
        self,
        targets: Tensor,
        row_weights: Tensor,
        row_losses: Tensor | None = None,
        predicted: Tensor | None = None,
    ) -> Tensor:
        """Return the loss, and fill the gradients.

        Args:
            targets: class indices, [rows].
            row_weights: factor of each row in the loss, [rows].
            row_losses: if given, filled with the unweighted loss of each row.
            predicted: if given, filled with the most likely class of each row.
        """
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
                multiply_into(logits, self.hidden[part], self.weight.t())
                for start_row in block_starts(len(logits), layout.block, first_chunk=start == 0):
                    block = logits[start_row : start_row + layout.block]
                    rows_here = slice(part.start + start_row, part.start + start_row + len(block))
                    block_weights = row_weights[rows_here].unsqueeze(1)
                    wide = block if same else scratch[: block.numel()].view(block.shape).copy_(block)
                    best = None if predicted is None else predicted[rows_here]
                    losses = self._softmax(wide, targets[rows_here].unsqueeze(1), block_weights, best)
                    loss += (losses * block_weights).sum()
                    if row_losses is not None:
                        row_losses[rows_here] = losses.squeeze(1)
                    if self.any_wanted and not same:
                        block.copy_(wide)
                self._products(logits, part)
        if self.bias is not None and self.grad_bias is not None:
            self.grad_bias = self.grad_bias.to(self.bias.dtype)
        return loss

    def _softmax(
        self, logits: Tensor, targets: Tensor, row_weights: Tensor, predicted: Tensor | None
    ) -> Tensor:
        """Return the losses [rows, 1] of a block of logits [rows, vocab]; overwrite it with its gradient.

        `predicted` [rows], if given, is filled with the most likely class of each row.
        """
        if self.bias is not None:
            logits += self.bias
        slope = self._cap(logits)
        if predicted is not None:
            predicted.copy_(logits.argmax(1))
        peak = logits.amax(1, keepdim=True)
        # Before the next line, which overwrites the logits.
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
        """Apply the soft cap in place, and return its derivative [rows, vocab]; `None` without a cap."""
        if self.softcap is None:
            return None
        logits.div_(self.softcap).tanh_()
        slope = 1 - logits.square() if self.any_wanted else None
        logits.mul_(self.softcap)
        return slope

    def _products(self, grad_logits: Tensor, part: slice) -> None:
        if self.grad_hidden is not None:
            multiply_into(self.grad_hidden[part], grad_logits, self.weight)
        if self.grad_weight is not None:
            # With beta 0, torch does not read the memory, which may be uninitialised and hold NaN.
            first = part.start == 0
            add_product(self.grad_weight, grad_logits.t(), self.hidden[part], beta=0 if first else 1)
