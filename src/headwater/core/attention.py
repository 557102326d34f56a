"""Attention in bf16 by the package's own kernel, which is faster than torch's on some processors.

The kernel (`native/attention.c`) is for processors with AVX-512 and without AMX. It is an operator of
torch, `headwater::attention`, so that dry runs, `torch.compile` and counts of operations see it. It rounds
where torch's kernel rounds, but sums in another order: results in bf16 differ from torch's by rounding. They
do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.core.errors import RunError
from headwater.core.modes import is_transformed
from headwater.core.native import native_library, processor_flags
from headwater.core.seen_keys import SeenKeys, seen_keys

AttentionKernel = Literal["auto", "torch"]
"""`auto`: the package's kernel where it can compute a call, otherwise torch's. `torch`: always torch's."""

_SIZE_UNIT, _LARGEST_SIZE = 16, 256
_NEEDED_FEATURES = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
_FASTER_FEATURES = frozenset({"amx_bf16", "amx_tile"})
"""On processors with these features torch's own kernel is faster, because it multiplies tiles of matrices."""

_OPERATORS = torch.library.Library("headwater", "DEF")
_OPERATORS.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? key_counts, bool causal, float scale) "
    "-> (Tensor, Tensor)"
)
_OPERATORS.define(
    "attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor output, "
    "Tensor log2_sums, Tensor? key_counts, bool causal, float scale) -> (Tensor, Tensor, Tensor)"
)
_ATTENTION: Any = torch.ops.headwater.attention
_ATTENTION_BACKWARD: Any = torch.ops.headwater.attention_backward


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    kernel: AttentionKernel = "auto",
) -> Tensor:
    """Return the attention of queries over keys and values, [batch, heads, queries, size].

    Args:
        query: queries, [batch, heads, queries, size].
        key: keys, [batch, heads or fewer, keys, size]; groups of adjacent heads share keys.
        value: values, [batch, heads or fewer, keys, size].
        causal: query i sees the keys up to key i; only without a mask.
        mask: True for visible keys (bool), or added to the scores; broadcasts to
            [batch, heads, queries, keys].
        dropout: dropout rate of the weights.
        scale: factor on the product of query and key; 1 / √size if not given.
        kernel: see `AttentionKernel`.
    """
    if kernel == "auto" and dropout == 0:
        output = kernel_attention(query, key, value, causal=causal, mask=mask, scale=scale)
        if output is not None:
            return output
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        # torch accepts a mask of numbers only in the dtype of the query.
        attn_mask=mask if mask is None or mask.dtype == torch.bool else mask.to(query.dtype),
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )


def kernel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor | None:
    """Return the attention by the package's kernel, or `None` if it cannot compute this call.

    The kernel supports the masks that `seen_keys` describes. Arguments are those of `fused_attention`.
    """
    if not _is_supported(query, key, value, scale):
        return None
    batches, _, queries, size = query.shape
    seen = SeenKeys(causal) if mask is None else seen_keys(mask, batches, queries, key.shape[2])
    if seen is None:
        return None
    scale = size**-0.5 if scale is None else scale
    output: Tensor = _ATTENTION(query, key, value, seen.counts, seen.causal, scale)[0]
    return output


def _is_supported(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> bool:
    """True if the kernel can compute this call, and is the faster one."""
    size = query.shape[-1]
    return (
        query.dtype == key.dtype == value.dtype == torch.bfloat16
        and query.device.type == key.device.type == value.device.type == "cpu"
        and query.dim() == key.dim() == 4
        and key.shape == value.shape
        and query.shape[0] == key.shape[0]
        and 0 not in (*query.shape, *key.shape)
        and query.shape[1] % key.shape[1] == 0
        and key.shape[-1] == size
        and size % _SIZE_UNIT == 0
        and size <= _LARGEST_SIZE
        and (scale is None or scale > 0)
        and not is_transformed()
        and attention_kernel_available()
    )


def attention_kernel_available() -> bool:
    """True if this machine can run the kernel: the processor has the instructions, and it was compiled."""
    return _library() is not None


# See the comment below `is_transformed` in `core/modes.py`.
attention_kernel_available._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _library() -> ctypes.CDLL | None:
    features = processor_flags()
    if not features >= _NEEDED_FEATURES or features & _FASTER_FEATURES:
        return None
    return native_library("attention")


class _Shape(ctypes.Structure):
    """`Shape` of the C source."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batches", "heads", "key_heads", "queries", "keys", "size")),
        ("scale", ctypes.c_float),
        ("causal", ctypes.c_int32),
    )


class _Tensor(ctypes.Structure):
    """`Tensor` of the C source."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((f"{name}_stride", ctypes.c_int64) for name in ("batch", "head", "row")),
    )


def _call(name: str, shape: _Shape, arguments: Sequence[Tensor | None]) -> None:
    """Call a function of the library. A 4-D tensor is passed with its strides, others by address alone.

    Raises:
        RunError: if memory is missing.
    """
    library = _library()
    assert library is not None, "the operator is called only where the kernel is available"
    # torch passes its number of threads to OpenMP when a thread first asks for it; the kernel uses it.
    torch.get_num_threads()
    passed = [
        ctypes.byref(_Tensor(each.data_ptr(), *each.stride()[:3]))
        if each is not None and each.dim() == 4
        else ctypes.c_void_p(None if each is None else each.data_ptr())
        for each in arguments
    ]
    if library[name](ctypes.byref(shape), *passed) != 0:
        raise RunError("no memory for the temporary tensors of attention", remedy="use smaller micro-batches")


def _shape(query: Tensor, key: Tensor, causal: bool, scale: float) -> _Shape:
    batches, heads, queries, size = query.shape
    return _Shape(batches, heads, key.shape[1], queries, key.shape[2], size, scale, causal)


def _rows(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy, with contiguous rows."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _heads_side_by_side(like: Tensor) -> Tensor:
    """Return a new tensor of this shape. In memory the heads of a position are side by side, as in torch."""
    batches, heads, length, size = like.shape
    return like.new_empty((batches, length, heads, size)).transpose(1, 2)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, key_counts: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    query, key, value = map(_rows, (query, key, value))
    output, log2_sums = _results(query)
    tensors = (query, key, value, output, log2_sums, key_counts)
    _call("attention_forward", _shape(query, key, causal, scale), tensors)
    return output, log2_sums


def _results(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _heads_side_by_side(query), query.new_empty(query.shape[:3], dtype=torch.float32)


def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log2_sums: Tensor,
    key_counts: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    causal, scale = options
    gradient, query, key, value, output = map(_rows, (gradient, query, key, value, output))
    results = _gradients(gradient, query, key, value)
    sums = _sums_for_shared_keys(query, key)
    tensors = (query, key, value, output, log2_sums.contiguous(), gradient, *results, sums, key_counts)
    _call("attention_backward", _shape(query, key, causal, scale), tensors)
    return results


def _sums_for_shared_keys(query: Tensor, key: Tensor) -> Tensor | None:
    """Return memory for the gradients of keys and values from each head; `None` if heads share no keys.

    They are added at the end, so their order does not depend on the threads. `plan/operator_flops.py` counts
    these bytes.
    """
    batches, heads, _, size = query.shape
    if key.shape[1] == heads:
        return None
    return query.new_empty(2 * batches * heads * key.shape[2] * size, dtype=torch.float32)


def _gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return _heads_side_by_side(query), _heads_side_by_side(key), _heads_side_by_side(value)


@final
class _Differentiable(torch.autograd.Function):
    """The operator with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_counts: Tensor | None,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        output, log2_sums = _below_autograd(query, key, value, key_counts, causal, scale)
        ctx.save_for_backward(query, key, value, output, log2_sums, key_counts)
        ctx.mark_non_differentiable(log2_sums)
        ctx.causal, ctx.scale = causal, scale
        return output, log2_sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _ATTENTION_BACKWARD(gradient, *ctx.saved_tensors, ctx.causal, ctx.scale)
        return (*gradients, None, None, None)


def _below_autograd(
    query: Tensor, key: Tensor, value: Tensor, key_counts: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        results: tuple[Tensor, Tensor] = _ATTENTION(query, key, value, key_counts, causal, scale)
        return results


def _with_gradient(
    query: Tensor, key: Tensor, value: Tensor, key_counts: Tensor | None, causal: bool, scale: float
) -> object:
    if torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value)):
        return _Differentiable.apply(query, key, value, key_counts, causal, scale)  # type: ignore[no-untyped-call]
    return _below_autograd(query, key, value, key_counts, causal, scale)


_OPERATORS.impl("attention", _forward, "CPU")
_OPERATORS.impl("attention", _results, "Meta")
_OPERATORS.impl("attention", _with_gradient, "AutogradCPU")
_OPERATORS.impl("attention_backward", _backward, "CPU")
_OPERATORS.impl("attention_backward", _gradients, "Meta")
