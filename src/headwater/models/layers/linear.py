"""Linear and embedding layers, whose weights the model initialises by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from headwater.core.buffers import large_zeros
from headwater.models.workspace import is_plain


class Linear(nn.Linear):
    """`nn.Linear` that draws no random numbers when it is made: its memory is uninitialised."""

    def reset_parameters(self) -> None:
        """Do nothing: `headwater.models.layers.initializers` sets the weights."""


class Embedding(nn.Embedding):
    """`nn.Embedding` that draws no random numbers when it is made: its memory is uninitialised."""

    def reset_parameters(self) -> None:
        """Do nothing: `headwater.models.layers.initializers` sets the weights."""

    def forward(self, input: Tensor) -> Tensor:
        if is_plain(self.weight) and not torch.compiler.is_compiling():
            return _Rows.apply(input, self.weight)  # type: ignore[no-any-return, no-untyped-call]
        return super().forward(input)


class _Rows(torch.autograd.Function):
    """Embedding lookup with a faster allocation of the gradient, which is bit-identical to torch's."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.size = table.shape
        return nn.functional.embedding(indices, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (indices,) = ctx.saved_tensors
        used, places = indices.unique(return_inverse=True)
        # torch's own sums, of the rows that occur alone: other operators may add in another order.
        rows = torch.ops.aten.embedding_dense_backward(gradient, places, len(used), -1, False)
        return None, large_zeros(ctx.size, gradient.dtype).index_copy_(0, used.long(), rows)
