"""The products of a linear layer whose weight has a mask, by the kernel `native/masked_products.c`.

torch multiplies the zeros of a masked weight like other numbers. The kernel multiplies only the weights that
the mask keeps, in forward and backward. It adds in another order than torch, so results differ by rounding.
They do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import math
import time
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.core.native import native_library
from headwater.core.plain import is_plain
from headwater.sparsity.masks import PackedMask

_DTYPES = (torch.float32, torch.bfloat16)
_OCTET = 8  # inputs and outputs of a layer are multiples of this
_MOST_KEPT = 2**31 - 1  # the kernel counts kept weights in 32 bits
_FEWEST_ROWS = 64  # with fewer rows, listing the kept weights takes longer than their products
_SMALLEST_FLOPS = 1 << 24  # of the dense product; below, the overhead of a call exceeds the gain
_PROBE = (512, 512)  # rows of the timed products, and both sizes of their weight
_PROBED_SHARE = 0.25
_LEAST_SPEEDUP = 1.1  # least speed relative to torch's product


@final
class MaskedProducts:
    """The products of a layer whose weight has a mask: by the kernel, or by torch where the kernel is slower.

    Args:
        mask: returns the present mask of the weight, [outputs, inputs].
        all_gradients: returns true if the gradients of masked weights are wanted; otherwise they are zero.
    """

    def __init__(self, mask: Callable[[], PackedMask], all_gradients: Callable[[], bool]) -> None:
        self._mask, self._all_gradients = mask, all_gradients

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x · weight^T + bias.

        Args:
            x: [..., inputs].
            weight: [outputs, inputs].
            bias: [outputs]; nothing is added if it is `None`.

        Returns:
            [..., outputs].
        """
        mask = self._mask()
        if not _fits(mask, x, weight, bias) or not _is_faster(mask, x, weight):
            return F.linear(x, weight, bias)
        return multiplied(mask, x, weight, bias)

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return gradient · weight.

        Args:
            gradient: of the output, [rows, outputs].
            weight: [outputs, inputs].

        Returns:
            The gradient of the input, [rows, inputs].
        """
        mask = self._mask()
        if not _is_faster(mask, gradient, weight):
            return gradient @ weight
        return _product(
            "masked_input_gradient", mask, gradient, (len(gradient), mask.shape[1]), weight=weight
        )

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return gradient^T · x, with zeros for masked weights unless all gradients are wanted.

        Args:
            gradient: of the output, [rows, outputs].
            x: the input, [rows, inputs].

        Returns:
            The gradient of the weight, [outputs, inputs].
        """
        mask = self._mask()
        if self._all_gradients() or not _is_faster(mask, gradient, x):
            return gradient.t() @ x
        return _product("masked_weight_gradient", mask, gradient, tuple(mask.shape), right=x)


def multiplied(mask: PackedMask, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x · weight^T + bias by the kernel, which must be available.

    Args:
        mask: of the weight.
        x: [..., inputs].
        weight: [outputs, inputs]; both sizes are multiples of 8.
        bias: [outputs]; nothing is added if it is not given.

    Returns:
        [..., outputs].
    """
    # In the final shape: autograd refuses to change a view of a matrix that one of its functions returns.
    return _product("masked_forward", mask, x, (*x.shape[:-1], mask.shape[0]), weight=weight, bias=bias)


def _fits(mask: PackedMask, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True if a mask and the arguments of a linear layer fit each other. If not, torch raises the error."""
    return (
        weight.shape == mask.shape
        and x.shape[-1:] == mask.shape[1:]
        and (bias is None or (is_plain(bias) and bias.dtype == x.dtype and bias.shape == mask.shape[:1]))
    )


def _is_faster(mask: PackedMask, left: Tensor, right: Tensor) -> bool:
    """True if the kernel can compute a product of these factors, and is faster than torch."""
    rows = math.prod(left.shape[:-1])
    return (
        rows >= _FEWEST_ROWS
        and 2 * rows * mask.shape.numel() >= _SMALLEST_FLOPS
        and all(size % _OCTET == 0 for size in mask.shape)
        and left.dtype == right.dtype
        and left.dtype in _DTYPES
        and is_plain(left)
        and is_plain(right)
        and mask.count <= _MOST_KEPT
        and mask.count < largest_kept_share(left.dtype) * mask.shape.numel()
    )


@functools.cache
def largest_kept_share(dtype: torch.dtype) -> float:
    """Return the share of kept weights up to which the kernel is faster than torch; 0 without the kernel.

    The time of the kernel is proportional to the number of kept weights. So the share is computed from the
    times of one product, which are measured once in a process.
    """
    if _library() is None:
        return 0.0
    rows, size = _PROBE
    drawn = functools.partial(torch.rand, generator=torch.Generator().manual_seed(0), device="cpu")
    x, weight = drawn(rows, size).to(dtype), drawn(size, size).to(dtype)
    mask = PackedMask(drawn(size, size) < _PROBED_SHARE)
    # Timed alternately, so that a change of the clock rate affects both.
    times = [(_seconds(F.linear, x, weight), _seconds(multiplied, mask, x, weight)) for _ in range(6)]
    gain = min(torchs for torchs, _ in times) / min(ours for _, ours in times)
    return min(_PROBED_SHARE * gain / _LEAST_SPEEDUP, 1.0)


def _seconds(multiply: Callable[..., Tensor], *factors: Any) -> float:
    start = time.perf_counter()
    multiply(*factors)
    return time.perf_counter() - start


def _product(
    name: str,
    mask: PackedMask,
    left: Tensor,
    size: tuple[int, ...],
    *,
    right: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return what a function of the library writes, a tensor of `size`; see `Product` in the C source."""
    library, (outputs, inputs), threads = _library(), mask.shape, torch.get_num_threads()
    # Variables, because the kernel reads their memory: each may be a new tensor.
    factors = [None if each is None else each.contiguous() for each in (left, right, weight, bias)]
    empty = functools.partial(torch.empty, device="cpu")  # the user may have set another default
    out = empty(size, dtype=left.dtype)
    starts = empty(library.masked_starts(inputs, outputs), dtype=torch.int32)
    places, values = empty(mask.count, dtype=torch.uint8), empty(mask.count, dtype=torch.float32)
    scratch = empty(threads * library.masked_scratch(inputs, outputs), dtype=torch.float32)
    product = _Product(
        *(None if each is None else each.data_ptr() for each in (*factors, mask.bits, out)),
        *(math.prod(left.shape[:-1]), inputs, outputs),
        *(each.data_ptr() for each in (starts, places, values, scratch)),
        threads,
        left.dtype == torch.bfloat16,
    )
    getattr(library, name)(ctypes.byref(product))
    return out


class _Product(ctypes.Structure):
    """`Product` of the C source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("left", "right", "weight", "bias", "bits", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "inner", "columns")),
        *((name, ctypes.c_void_p) for name in ("starts", "places", "values", "scratch")),
        ("threads", ctypes.c_int64),
        ("is_half", ctypes.c_int32),
    )


@functools.cache
def _library() -> Any:
    library: Any = native_library("masked_products")
    if library is not None:
        for function in (library.masked_starts, library.masked_scratch):
            function.argtypes, function.restype = (ctypes.c_int64, ctypes.c_int64), ctypes.c_int64
    return library
