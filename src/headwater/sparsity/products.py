"""The products of a linear layer whose weight has a mask, by the kernel `native/masked_products.c`.

torch multiplies the zeros of a masked weight like other numbers. The kernel multiplies only the weights that
the mask keeps, in forward and backward. It adds in another order than torch, so results differ by rounding.
They do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core.native import native_library
from headwater.sparsity.masks import PackedMask

_DTYPES = (torch.float32, torch.bfloat16)
_OCTET = 8  # inputs and outputs of a layer are multiples of this
_FEWEST_ROWS = 64  # with fewer rows, listing the kept weights takes longer than their products
_SMALLEST_FLOPS = 1 << 24  # of the dense product; below, the overhead of a call exceeds the gain
_PROBE = (512, 512)  # rows of the timed products, and both sizes of their weight
_PROBED_SHARE = 0.25
_WORTH_IT = 1.1  # least speed relative to torch's product


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
        mask, rows = self._mask(), x.reshape(-1, x.shape[-1])
        if not _is_faster(mask, rows, weight) or (bias is not None and bias.dtype != x.dtype):
            return F.linear(x, weight, bias)
        return multiplied(mask, rows, weight, bias).view(*x.shape[:-1], mask.shape[0])

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


def multiplied(mask: PackedMask, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows · weight^T + bias by the kernel, which must be available.

    Args:
        mask: of the weight.
        rows: [rows, inputs].
        weight: [outputs, inputs]; both sizes are multiples of 8.
        bias: [outputs]; nothing is added if it is not given.

    Returns:
        [rows, outputs].
    """
    return _product("masked_forward", mask, rows, (len(rows), mask.shape[0]), weight=weight, bias=bias)


def _is_faster(mask: PackedMask, left: Tensor, right: Tensor) -> bool:
    """True if the kernel can compute a product of these factors, and is faster than torch."""
    return (
        len(left) >= _FEWEST_ROWS
        and 2 * len(left) * mask.shape.numel() >= _SMALLEST_FLOPS
        and all(size % _OCTET == 0 for size in mask.shape)
        and left.dtype == right.dtype
        and left.dtype in _DTYPES
        and all(type(each) in (Tensor, nn.Parameter) and each.is_cpu for each in (left, right))
        and mask.count <= largest_kept_share(left.dtype) * mask.shape.numel()
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
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, size), (size, size)))
    mask = PackedMask(torch.rand(size, size, generator=generator) < _PROBED_SHARE)
    # In turn: a change of the clock rate then affects both.
    times = [(_seconds(F.linear, x, weight), _seconds(multiplied, mask, x, weight)) for _ in range(6)]
    gain = min(torchs for torchs, _ in times) / min(ours for _, ours in times)
    return min(_PROBED_SHARE * gain / _WORTH_IT, 1.0)


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
    out = torch.empty(size, dtype=left.dtype)
    starts = torch.empty(library.masked_starts(inputs, outputs), dtype=torch.int32)
    places, values = torch.empty(mask.count, dtype=torch.uint8), torch.empty(mask.count)
    scratch = torch.empty(threads * library.masked_scratch(inputs, outputs))
    product = _Product(
        *(None if each is None else each.data_ptr() for each in (*factors, mask.bits, out)),
        *(len(left), inputs, outputs),
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
