"""The kinds of matrix products, and the settings of torch that decide the bits of results on a GPU.

The settings are set for a context and then restored. A user's own training loop computes with the user's
settings, as in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.utils.deterministic

Matmul = Literal["auto", "exact", "fast"]
"""What a user allows. `exact`: the products of torch. `fast`: also products that differ by rounding. `auto`:
like `exact` in fp32 and in the user's own loop; other runs may use `converted` kernels."""

Kernels = Literal["exact", "converted", "fast"]
"""`exact`: torch's kernels, on a GPU only deterministic ones without TF32. `converted`, on a CPU: fp32
kernels compute products in bf16 and fp16 too, see [Note: products in half precision]. `fast`: on a GPU, TF32;
on a CPU, `converted`, and oneDNN in fp32 where it is faster."""

_DETERMINISTIC: Any = torch.utils.deterministic
_MATMUL: Any = torch.backends.cuda.matmul
_CUDNN: Any = torch.backends.cudnn
_BENCHMARK = (_CUDNN, "benchmark")
_TF32 = ((_MATMUL, "allow_tf32"), (_CUDNN, "allow_tf32"))
_NARROW_SUMS = (
    (_MATMUL, "allow_bf16_reduced_precision_reduction"),
    (_MATMUL, "allow_fp16_reduced_precision_reduction"),
)


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Enter a context in which equal inputs lead to equal bits, and products are as exact as their dtypes.

    All kernels are deterministic. Otherwise the backward of attention would add gradients in a different
    order in each run. Products and convolutions in fp32 do not use TF32. Products in 16 bits are summed in
    fp32.

    Raises:
        RuntimeError: by torch, if an operator has no deterministic kernel; see `device_errors`.
    """
    deterministic, warns = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    fill = _DETERMINISTIC.fill_uninitialized_memory
    # Not `warn_only`: torch's attention then computes its backward with the faster kernel, and only warns.
    torch.use_deterministic_algorithms(True)
    # If true, torch fills every new tensor, which takes time. No result depends on these values.
    _DETERMINISTIC.fill_uninitialized_memory = False
    try:
        with _set((*_TF32, *_NARROW_SUMS, _BENCHMARK), False):
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        _DETERMINISTIC.fill_uninitialized_memory = fill


@contextmanager
def fast_arithmetic() -> Iterator[None]:
    """Enter a context in which products and convolutions in fp32 use TF32, with a mantissa of 10 bits."""
    with _set(_TF32, True):
        yield


@contextmanager
def _set(switches: tuple[tuple[Any, str], ...], value: bool) -> Iterator[None]:
    """Set switches of torch inside the context."""
    before = [getattr(owner, name) for owner, name in switches]
    try:
        for owner, name in switches:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name), value_before in zip(switches, before, strict=True):
            setattr(owner, name, value_before)
