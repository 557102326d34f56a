"""Linear layers of few rows on a CPU by the package's own kernel (`native/few_rows.c`).

A model that writes a text reads one token in each pass, so the products of its linear layers have one row.
For them MKL uses one core and a part of the bandwidth of the memory. The kernel uses all cores and fetches
the weight ahead. It adds in another order than torch, so results differ from torch's by rounding. A row of
the result depends neither on the other rows nor on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.core.modes import autocast_dtype, cast, is_transformed
from headwater.core.native import native_library
from headwater.core.plain import is_plain

MOST_ROWS = 8
"""Largest number of rows of a product that the kernel computes."""

MOST_ROWS_OF_DTYPE = {torch.float32: MOST_ROWS, torch.bfloat16: 4}
"""Largest number of rows by dtype. With more rows in bf16, torch's kernel is faster: it uses instructions for
products of bf16."""


def few_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `torch.nn.functional.linear` of the arguments, by the kernel if it can compute this call.

    Args:
        x: the input, [..., inputs].
        weight: the weight, [outputs, inputs].
        bias: [outputs]; no bias if not given.

    Returns:
        [..., outputs].
    """
    if torch.compiler.is_compiling() or _sees_operators():
        return F.linear(x, weight, bias)
    library, autocast = _library(), autocast_dtype("cpu")
    row, added = cast(x, autocast), None if bias is None else cast(bias, autocast)
    if library is None or not _is_supported(row, weight, added, autocast):
        return F.linear(x, weight, bias)
    inner = row.shape[-1]
    out = row.new_empty((*row.shape[:-1], weight.shape[0]))
    library.multiply_few_rows(
        ctypes.byref(
            _Product(
                row.data_ptr(),
                weight.data_ptr(),
                None if added is None else added.data_ptr(),
                out.data_ptr(),
                row.numel() // inner,
                inner,
                weight.shape[0],
                weight.stride(0),
                # torch passes its number of threads to OpenMP when a thread first asks for it.
                torch.get_num_threads(),
                row.dtype == torch.bfloat16,
            )
        )
    )
    return out


def _sees_operators() -> bool:
    """True if torch must see the operators: for gradients, transforms, `torch.jit.trace`, dispatch modes."""
    return (
        torch.is_grad_enabled()
        or is_transformed()
        or torch._C._get_tracing_state() is not None
        # For example a counter of FLOPs, or a mode that returns tensors without memory.
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _is_supported(x: Tensor, weight: Tensor, bias: Tensor | None, autocast: torch.dtype | None) -> bool:
    """True if the kernel can compute this call, whose input and bias are cast already."""
    return (
        is_plain(x)
        and is_plain(weight)
        and x.dtype == weight.dtype == (autocast or x.dtype)
        and x.dim() > 0
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1]
        and 0 < x.numel() <= MOST_ROWS_OF_DTYPE.get(x.dtype, 0) * x.shape[-1]
        and weight.stride(1) == 1
        and x.is_contiguous()
        and (bias is None or (is_plain(bias) and bias.dtype == x.dtype and bias.is_contiguous()))
        # torch also accepts a bias of one number.
        and (bias is None or bias.shape == weight.shape[:1])
    )


class _Product(ctypes.Structure):
    """`Product` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("left", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "inner", "columns", "weight_stride", "threads")),
        ("is_half", ctypes.c_int32),
    )


@functools.cache
def _library() -> Any:
    return native_library("few_rows")


def few_row_product_available() -> bool:
    """True if the kernel was compiled on this machine."""
    return _library() is not None
