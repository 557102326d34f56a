"""The products of a linear layer, which can be replaced without changing what autograd saves."""

from __future__ import annotations

import math
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headwater.core.modes import autocast_dtype, cast, is_transformed


class Products(Protocol):
    """The product of a linear layer, and the two products of its backward."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x · weight^T + bias, [..., outputs], of an input [..., inputs]."""

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return gradient · weight, [rows, inputs], of a gradient [rows, outputs]."""

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return gradient^T · x, [outputs, inputs], of matrices with equally many rows."""


@final
class TorchProducts:
    """The products of torch."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x · weight^T + bias."""
        return F.linear(x, weight, bias)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return gradient · weight."""
        return gradient @ weight

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return gradient^T · x."""
        return gradient.t() @ x


TORCH_PRODUCTS = TorchProducts()


def as_matrix(x: Tensor) -> Tensor:
    """Return the rows of a tensor [..., columns] as a matrix, also if it has no elements."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def linear(products: Products, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `torch.nn.functional.linear` of the arguments, computed by other products.

    Args:
        products: computes forward and backward. Compilers and transforms of functions see torch's instead.
        x: [..., inputs].
        weight: [outputs, inputs].
        bias: [outputs]; no bias if it is `None`.

    Returns:
        [..., outputs].
    """
    if torch.compiler.is_compiling() or is_transformed():
        return F.linear(x, weight, bias)
    autocast = autocast_dtype(weight.device.type)
    added = None if bias is None else cast(bias, autocast)
    return _Linear.apply(products, cast(x, autocast), cast(weight, autocast), added)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    saves_unchanged_inputs = True  # as torch's own function; see [Note: memory that kernels write]

    @staticmethod
    def forward(ctx: Any, products: Products, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.products = products
        # Not the parameter: outside of its module, a streamed parameter reads the fp32 value in the store.
        ctx.save_for_backward(x, weight.detach())
        return products.forward(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = as_matrix(gradient)
        grad_x = ctx.products.input_gradient(rows, weight).view_as(x) if needs_x else None
        grad_weight = ctx.products.weight_gradient(rows, as_matrix(x)) if needs_weight else None
        return None, grad_x, grad_weight, rows.sum(0) if needs_bias else None
