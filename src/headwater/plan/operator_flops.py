"""Floating-point operations and temporary memory of single operators.

Operations of attention are counted separately, because their rate differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_KERNEL, _KERNEL_BACKWARD = "headwater::attention", "headwater::attention_backward"
"""Operators of `core.attention`."""


class OperatorFlops(NamedTuple):
    """Floating-point operations of an operator.

    Attributes:
        whole: all of them.
        attention: those of torch's fused attention.
        kernel_attention: those of the package's kernel, see `core.attention`.
    """

    whole: int
    attention: int = 0
    kernel_attention: int = 0


Counter = Callable[[tuple[Any, ...], dict[str, Any], Any], OperatorFlops]
"""A function (args, kwargs, out) -> operations of one call of an operator."""

_NONE = OperatorFlops(0)


def operator_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OperatorFlops:
    """Return the operations of a call; none if neither torch nor this module can count them."""
    counter = _counter(func)
    return _NONE if counter is None else counter(args, kwargs, out)


@functools.cache
def _counter(func: Any) -> Counter | None:
    """Return the function that counts the operations of an operator; `None` if they cannot be counted."""
    packet = func._overloadpacket
    if func.name() == _KERNEL:
        return _of_kernel
    if func.name() == _KERNEL_BACKWARD:
        return _of_kernel_backward
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu:
        return _of_attention
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return _of_attention_backward
    count = _torch_counter(packet)
    if count is None:
        return None

    def of_torch(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OperatorFlops:
        flops = count(*args, **kwargs, out_val=out)
        return OperatorFlops(flops, flops if "attention" in packet.__name__ else 0)

    return of_torch


def _of_kernel(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OperatorFlops:
    query, key, value, _, is_causal = args[:5]
    count = _attention(query, key, value, is_causal=is_causal, products=(1, 1))
    return OperatorFlops(count, kernel_attention=count)


def _of_kernel_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OperatorFlops:
    # Three products run over the size of keys: the scores again, and the gradients of query and key. Two run
    # over the size of values: the gradients of value and of the attention weights.
    _, query, key, value, _, _, _, is_causal = args[:8]
    count = _attention(query, key, value, is_causal=is_causal, products=(3, 2))
    return OperatorFlops(count, kernel_attention=count)


def _of_attention(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OperatorFlops:
    count = _attention(*args, products=(1, 1), **kwargs)
    return OperatorFlops(count, count)


def _of_attention_backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> OperatorFlops:
    _, query, key, value, _, _, dropout_p, is_causal = args[:8]
    count = _attention(query, key, value, dropout_p, is_causal, products=(3, 2))
    return OperatorFlops(count, count)


def temporary_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes of the large temporary tensors of a call.

    Only the package's backward of attention has some: if heads share keys, it keeps the gradients of keys and
    values from each head in fp32.
    """
    if func.name() != _KERNEL_BACKWARD:
        return 0
    _, query, key, *_ = args
    batch, heads, _, size = query.shape
    return 0 if key.shape[1] == heads else 2 * batch * heads * key.shape[2] * size * torch.float32.itemsize


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    products: tuple[int, int],
    **_: Any,
) -> int:
    """Return the operations of torch's fused attention on a CPU, which torch does not count.

    With `is_causal` a query is paired only with the keys up to its position. Other pairs are not computed.

    Args:
        query: [batch, heads, queries, size].
        key: [batch, heads, keys, size].
        value: [batch, heads, keys, value size].
        dropout_p: not used.
        is_causal: whether later keys are left out.
        products: the number of matrix products over the size of keys, and over that of values.
    """
    batch, heads, queries, size = query.shape
    keys = key.shape[-2]
    pairs = queries * keys
    if is_causal:
        square = min(queries, keys)
        pairs = square * (square + 1) // 2 + (queries - square) * keys
    return 2 * batch * heads * pairs * (products[0] * size + products[1] * value.shape[-1])


def _torch_counter(operator: Any) -> Callable[..., int] | None:
    """Return torch's function that counts an operator's operations; `None` if torch cannot.

    An in-place operator (`addmm_`) is counted like the operator that returns its result (`addmm`).
    """
    found, name = flop_registry.get(operator), operator.__name__
    if found is None and name.endswith("_") and getattr(_aten, name, None) is operator:
        found = flop_registry.get(getattr(_aten, name[:-1], None))
    return found
