"""Matrix products and attention in bf16 and fp16 on processors that have no instructions for them.

[Note: products in half precision] On a processor without AVX-512, as in most laptops, torch multiplies bf16
matrices in plain loops, at a fifth to a twentieth of its rate for fp32. With AVX-512 but without its
extension for bf16, as in Intel's processors from Skylake to Ice Lake, oneDNN emulates that extension, at a
quarter of the rate for fp32. Here the factors are converted to fp32, torch's fp32 kernels multiply them, and
the results are rounded. Both ways sum in fp32, in another order, so results differ by rounding.

Torch's kernels are replaced for the whole process: so forward and backward of any model reach this module,
and dry runs and counts of operations see the same operators as before. The new kernels compute as torch does,
except in a thread that is in the context `converted_half_products`, and everywhere after
`convert_half_products_everywhere`, except in the context `half_kernels(converted=False)`. Autograd computes
the backward on a CPU in the thread that calls it. Products with an argument `out` and in-place ones, as in
code of `torch.compile`, stay torch's own, unless the code calls `multiply_into` and `add_product`. The
backward of torch's attention is replaced likewise; its forward is not slow.
"""

from __future__ import annotations

import functools
import itertools
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from headwater.core.dry_run import counts_costs
from headwater.core.modes import convert_everywhere, converts_half_products, half_kernels
from headwater.core.native import processor_flags
from headwater.core.uncompiled import never_compile

_MOST_ELEMENTS = 8 * 1024**2
"""Most elements of the fp32 copies that exist at once. Larger products are computed in pieces."""

_ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
_TENSORS_OF_BACKWARD = 8  # as large as the queries: five that the backward reads, and three gradients

_X86 = frozenset({"x86_64", "AMD64"})

_BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert"})
"""The features of x86 processors that multiply or convert bf16."""


@contextmanager
def converted_half_products() -> Iterator[None]:
    """Enter a context in which this thread uses the products of this module, if torch's are slow here."""
    if slow_half_dtypes():
        _install()
    with half_kernels(converted=True):
        yield


def convert_half_products_everywhere() -> None:
    """Use the products of this module outside of all contexts from now on, if torch's are slow here."""
    if slow_half_dtypes():
        _install()
        convert_everywhere()


@functools.cache
def slow_half_dtypes() -> frozenset[torch.dtype]:
    """Return those of bf16 and fp16 that torch multiplies much slower than fp32 on this processor."""
    library: Any = torch.ops.mkldnn
    if platform.machine() not in _X86 or not torch.backends.mkldnn.is_available():
        return frozenset()  # on other processors and without oneDNN nothing was measured
    flags = processor_flags()
    # oneDNN supports bf16 on each processor with AVX-512, and emulates what the processor lacks.
    is_emulated = bool(flags) and not flags & _BF16_FEATURES
    slow = {
        torch.bfloat16: is_emulated or not library._is_mkldnn_bf16_supported(),
        torch.float16: not library._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype, is_slow in slow.items() if is_slow)


@functools.cache
def _install() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # torch warns of a kernel that replaces another one, which is the intent here.
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        for name, compute in (("mm", _product), ("bmm", _products)):
            _replace(library, name, product_kernel(getattr(torch, name), compute))
        for name, compute in (("addmm", _product), ("baddbmm", _products)):
            _replace(library, name, sum_kernel(getattr(torch, name), compute))
        backward = torch.library.get_kernel(f"aten::{_ATTENTION_BACKWARD}", "CPU")
        kernel = attention_backward_kernel(backward.call_boxed)
        _replace(library, _ATTENTION_BACKWARD, kernel, with_keyset=True)
    return library


def _replace(
    library: torch.library.Library, name: str, kernel: Callable[..., Any], *, with_keyset: bool = False
) -> None:
    """Replace torch's kernel of an operator on the CPU."""
    # Otherwise `torch.compile` would compile a kernel that a module of torch calls in a compiled model.
    never_compile(kernel)
    library.impl(name, kernel, "CPU", with_keyset=with_keyset)


def multiply_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Write left @ right to `out`, by the kernels that the process uses.

    Args:
        out: [rows, columns].
        left: [rows, inner].
        right: [inner, columns].
    """
    if _is_replaced(left, right):
        _product(left, right, None, 1, 1, out)
    else:
        torch.mm(left, right, out=out)


def add_product(total: Tensor, left: Tensor, right: Tensor, *, beta: float) -> None:
    """Write beta · total + left @ right to `total`, by the kernels that the process uses.

    Args:
        total: [rows, columns]; not read if `beta` is 0.
        left: [rows, inner].
        right: [inner, columns].
        beta: factor of `total`.
    """
    if _is_replaced(left, right, total):
        _product(left, right, total, beta, 1, total)
    else:
        total.addmm_(left, right, beta=beta)


def _is_replaced(left: Tensor, right: Tensor, added: Tensor | None = None) -> bool:
    """True if this module computes a product here. Dry runs count torch's operators."""
    return left.device.type == "cpu" and not counts_costs() and _computes(left, right, added)


# Other products call torch's kernel with `out`, which computes the same bits and is not replaced. They do not
# call the kernel that was replaced, because Python can call it only while no other thread of Python runs.


def product_kernel(torchs: Callable[..., Tensor], compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the kernel for `torchs`, which is `torch.mm` or `torch.bmm`.

    Args:
        torchs: the function of torch.
        compute: `_product` or `_products`.
    """

    def multiply(left: Tensor, right: Tensor) -> Tensor:
        if _computes(left, right):
            return compute(left, right, None, 1, 1, _room(left, right))
        return torchs(left, right, out=left.new_empty(0))

    return multiply


def sum_kernel(torchs: Callable[..., Tensor], compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the kernel for `torchs`, which is `torch.addmm` or `torch.baddbmm`; see `product_kernel`."""

    def add(added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        if _computes(left, right, added):
            out = _room(left, right)
            return compute(left, right, added.expand(out.shape), beta, alpha, out)
        return torchs(added, left, right, beta=beta, alpha=alpha, out=left.new_empty(0))

    return add


def _computes(left: Tensor, right: Tensor, added: Tensor | None = None) -> bool:
    """True if this module computes a product. It leaves errors and empty products to torch."""
    return (
        left.dtype in slow_half_dtypes()
        and converts_half_products()
        and left.dtype == right.dtype
        and left.dim() == right.dim()
        and left.shape[-1] == right.shape[-2]
        and left.shape[:-2] == right.shape[:-2]
        and 0 not in (*left.shape, *right.shape)
        and (added is None or (added.dtype == left.dtype and _expands(added, left, right)))
    )


def _expands(added: Tensor, left: Tensor, right: Tensor) -> bool:
    shape = (*left.shape[:-1], right.shape[-1])
    ends = zip(reversed(added.shape), reversed(shape), strict=False)
    return added.dim() <= len(shape) and all(size in (1, end) for size, end in ends)


def _room(left: Tensor, right: Tensor) -> Tensor:
    """Return uninitialized memory for a product."""
    return left.new_empty(*left.shape[:-1], right.shape[-1])


def _products(
    left: Tensor, right: Tensor, added: Tensor | None, beta: float, alpha: float, out: Tensor
) -> Tensor:
    """Write alpha · left @ right + beta · added to `out`, where the first dimension counts products.

    Args:
        left: [products, rows, inner].
        right: [products, inner, columns].
        added: [products, rows, columns]; nothing is added if it is `None`.
        beta: factor of `added`.
        alpha: factor of the products.
        out: [products, rows, columns]; may be `added`.

    Returns:
        `out`.
    """
    count, rows, inner = left.shape
    columns = right.shape[2]
    at_once = _MOST_ELEMENTS // _elements(rows, inner, columns)
    if at_once == 0:
        for index in range(count):
            total = None if added is None else added[index]
            _product(left[index], right[index], total, beta, alpha, out[index])
        return out
    for start in range(0, count, at_once):
        part = slice(start, start + at_once)
        factors = left[part].float(), right[part].float()
        result = factors[0].new_empty(0)
        if added is None:
            torch.bmm(*factors, out=result)
        else:
            torch.baddbmm(added[part].float(), *factors, beta=beta, alpha=alpha, out=result)
        out[part] = result
    return out


def _product(
    left: Tensor, right: Tensor, added: Tensor | None, beta: float, alpha: float, out: Tensor
) -> Tensor:
    """Write alpha · left @ right + beta · added of matrices to `out`, and return it; see `_products`."""
    (rows, inner), columns = left.shape, right.shape[1]
    most_rows, most_inner, most_columns = _piece(rows, inner, columns)
    for row, column in itertools.product(range(0, rows, most_rows), range(0, columns, most_columns)):
        here = slice(row, row + most_rows), slice(column, column + most_columns)
        result = left.new_empty(0, dtype=torch.float32)
        for start in range(0, inner, most_inner):
            part = slice(start, start + most_inner)
            factors = left[here[0], part].float(), right[part, here[1]].float()
            if start > 0:
                torch.addmm(result, *factors, alpha=alpha, out=result)
            elif added is None:
                torch.mm(*factors, out=result)
            else:
                torch.addmm(added[here].float(), *factors, beta=beta, alpha=alpha, out=result)
        out[here] = result
    return out


def _piece(rows: int, inner: int, columns: int) -> tuple[int, int, int]:
    """Return the rows, inner size and columns of the pieces of a product: the longest is halved first."""
    sizes = [rows, inner, columns]
    while _elements(*sizes) > _MOST_ELEMENTS:
        longest = sizes.index(max(sizes))
        sizes[longest] = -(-sizes[longest] // 2)
    return sizes[0], sizes[1], sizes[2]


def _elements(rows: int, inner: int, columns: int) -> int:
    """Return the number of elements of both factors and the result."""
    return rows * inner + inner * columns + rows * columns


def attention_backward_kernel(torchs: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Return the kernel for the backward of torch's attention on a CPU.

    No form of torch's kernel with `out` exists. So other threads of Python wait while this kernel computes.

    Args:
        torchs: torch's own kernel, whose first argument is a set of dispatch keys.
    """

    def backward(
        keys: Any, *arguments: Any, attn_mask: Tensor | None = None, scale: float | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient, query, key, value, output, log_sums, dropout, is_causal = arguments

        def compute(read: Iterable[Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            results: tuple[Tensor, Tensor, Tensor] = torchs(
                keys, *read, dropout, is_causal, attn_mask=mask, scale=scale
            )
            return results

        read = gradient, query, key, value, output, log_sums
        if query.dtype not in slow_half_dtypes() or not converts_half_products():
            return compute(read, attn_mask)
        # The layout of torch's results: the heads of a token are adjacent.
        results = tuple(
            each.new_empty(each.transpose(1, 2).shape).transpose(1, 2) for each in (query, key, value)
        )
        for part, part_of_keys in _parts_of_attention(query, key):
            mask = None if attn_mask is None else _part_of_mask(attn_mask, part)
            parts = part, part, part_of_keys, part_of_keys, part, part
            found = compute([each[own].float() for each, own in zip(read, parts, strict=True)], mask)
            for result, own, gradient_of_part in zip(results, parts[1:4], found, strict=True):
                result[own] = gradient_of_part
        return results[0], results[1], results[2]

    return backward


_Part = tuple[slice, slice]
"""Samples and heads."""


def _parts_of_attention(query: Tensor, key: Tensor) -> Iterator[tuple[_Part, _Part]]:
    """Yield the parts whose backward is computed at once: temporary tensors are small then.

    Args:
        query: [batch, heads, queries, size].
        key: [batch, heads or fewer, keys, size]; the same number of query heads shares each of its heads.

    Yields:
        The samples and heads of the queries, and those of their keys.
    """
    (batch, heads, queries, size), key_heads = query.shape, key.shape[1]
    shared = heads // key_heads
    elements = _TENSORS_OF_BACKWARD * max(queries, key.shape[2]) * size
    # Each thread computes whole heads. Heads that share keys stay together.
    most = -(-max(torch.get_num_threads(), _MOST_ELEMENTS // elements) // shared)
    for sample, head in itertools.product(range(batch), range(0, key_heads, most)):
        samples, end = slice(sample, sample + 1), min(head + most, key_heads)
        yield (samples, slice(shared * head, shared * end)), (samples, slice(head, end))


def _part_of_mask(mask: Tensor, part: _Part) -> Tensor:
    """Return the mask of some samples and heads, in fp32, as torch's kernel takes it.

    Args:
        mask: [batch or 1, heads or 1, queries, keys], or [queries, keys].
        part: the samples and heads.
    """
    if mask.dim() == 4:
        # A dimension of size 1 holds for all samples, or for all heads.
        chosen = (each if size > 1 else slice(1) for each, size in zip(part, mask.shape, strict=False))
        mask = mask[tuple(chosen)]
    return mask.float()
