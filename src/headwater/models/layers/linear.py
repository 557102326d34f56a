"""Linear and embedding layers, whose weights the model initialises by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from headwater.core.buffers import large_zeros
from headwater.core.modes import autocast_dtype, cast, is_transformed
from headwater.core.plain import is_plain
from headwater.models.layers.products import TORCH_PRODUCTS, Products, linear
from headwater.models.layers.replaced import Multiply, Replacement, replaced_forward


class Linear(nn.Linear):
    """`nn.Linear` that draws no random numbers when it is made: its memory is uninitialised.

    Attributes:
        products: compute the product and its backward; see `replaced_products`.
        multiply: computes the product if `products` are torch's; see `models/few_rows.py`.
    """

    products: Products = TORCH_PRODUCTS
    multiply: Multiply = staticmethod(F.linear)

    def forward(self, input: Tensor) -> Tensor:
        if self.products is not TORCH_PRODUCTS:
            return linear(self.products, input, self.weight, self.bias)
        return self.multiply(input, self.weight, self.bias)

    def reset_parameters(self) -> None:
        """Do nothing: `headwater.models.layers.initializers` sets the weights."""


def replaced_products(module: nn.Module, products: Products) -> Replacement | None:
    """Return the replacement of the products of a linear layer.

    Args:
        module: any module.
        products: the new products.

    Returns:
        The replacement; `None` if the module is not a linear layer, or its class may do more with its weight.
    """
    if isinstance(module, Linear):
        return Replacement(module, "products", products)
    return replaced_forward(module, functools.partial(linear, products))


class LinearAfter(Linear):
    """A linear layer that also takes the inputs of the function before it.

    `layer(x)` is a plain linear layer. `layer(*inputs, apply_function=True)` is this layer on
    `function(*inputs)`: autograd saves the inputs, and not the value of the function. Backward computes this
    value again, with the same bits. That takes one pass over the inputs, and saves the memory of the value
    from forward to backward.

    Args:
        function: a function of tensors [..., inputs] that returns such a tensor, without random numbers.
        inputs: width of the function's value.
        outputs: width of the output.
        bias: add a bias.
    """

    def __init__(self, function: Callable[..., Tensor], inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.function = function

    def forward(self, *inputs: Tensor, apply_function: bool = False) -> Tensor:
        # The default is a plain linear layer, because a wrapper around it does not know `apply_function`.
        if not apply_function:
            return super().forward(*inputs)
        if _needs_plain(inputs[0]):
            return super().forward(self.function(*inputs))
        autocast = autocast_dtype(self.weight.device.type)
        weight = cast(self.weight, autocast)
        bias = None if self.bias is None else cast(self.bias, autocast)
        return _LinearAfter.apply(self.function, self.products, autocast, weight, bias, *inputs)  # type: ignore[no-any-return, no-untyped-call]


def _needs_plain(x: Tensor) -> bool:
    """True if `_LinearAfter` must not be used here."""
    return (
        torch.compiler.is_compiling()  # compilers decide themselves what to compute again
        or is_transformed()
        or x.dim() < 2  # torch has another kernel for vectors
        or not torch.is_grad_enabled()  # no value is kept for a backward
    )


class _LinearAfter(torch.autograd.Function):
    """Autograd function of `LinearAfter`: bit-identical to the function and `torch.nn.functional.linear`."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Tensor],
        products: Products,
        autocast: torch.dtype | None,
        weight: Tensor,
        bias: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.function, ctx.products, ctx.autocast = function, products, autocast
        # Not the parameter: outside of its module, a streamed parameter reads the fp32 value in the store.
        ctx.save_for_backward(weight.detach(), *inputs)
        return products.forward(cast(function(*inputs), autocast), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, *inputs = ctx.saved_tensors
        _, _, _, needs_weight, needs_bias, *needs_inputs = ctx.needs_input_grad
        leaves = [each.detach().requires_grad_(need) for each, need in zip(inputs, needs_inputs, strict=True)]
        # Autocast ends before backward, and the function may depend on it.
        with torch.enable_grad(), _autocast_again(weight.device.type, ctx.autocast):
            value = cast(ctx.function(*leaves), ctx.autocast)
        rows = gradient.flatten(0, -2)
        grad_weight = (
            ctx.products.weight_gradient(rows, value.detach().flatten(0, -2)) if needs_weight else None
        )
        grad_bias = rows.sum(0) if needs_bias else None
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        inner = ctx.products.input_gradient(rows, weight).view_as(value) if wanted else None
        found = iter(torch.autograd.grad(value, wanted, inner) if wanted else ())
        given = [next(found) if leaf.requires_grad else None for leaf in leaves]
        return None, None, None, grad_weight, grad_bias, *given


def _autocast_again(device: str, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Return a context with the autocast of the forward; `dtype` is `None` if it ran without autocast."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext()
    return torch.autocast(device, dtype=dtype, enabled=dtype is not None)


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
        # Only for rows that occur. torch's operator adds them, because another order of sums would round
        # differently.
        rows = torch.ops.aten.embedding_dense_backward(gradient, places, len(used), -1, False)
        return None, large_zeros(ctx.size, gradient.dtype).index_copy_(0, used.long(), rows)
