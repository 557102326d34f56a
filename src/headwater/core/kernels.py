"""The kernels by which a run multiplies matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from headwater.core.arithmetic import Kernels, Matmul, exact_arithmetic, fast_arithmetic
from headwater.core.half_products import converted_half_products, slow_half_dtypes
from headwater.core.modes import half_kernels
from headwater.core.precision import Precision
from headwater.core.single_products import fast_single_products

_Context = Callable[[], AbstractContextManager[object]]


def choose_kernels(matmul: Matmul, precision: Precision, device: str, *, own_loop: bool) -> Kernels:
    """Return the kernels of a run.

    Args:
        matmul: what the user allows.
        precision: precision of the run.
        device: `cpu` or `cuda`.
        own_loop: True if the user's own loop trains. Its products in fp32, and all on a GPU, are torch's.
    """
    if matmul == "fast" and not own_loop:
        return "fast"
    may_convert = matmul == "fast" or (matmul == "auto" and not own_loop)
    return "converted" if may_convert and multiplies_slowly(precision, device) else "exact"


def multiplies_slowly(precision: Precision, device: str) -> bool:
    """True if torch multiplies in the dtype of a precision much slower than in fp32.

    Args:
        precision: precision of a run.
        device: `cpu` or `cuda`.
    """
    return device == "cpu" and precision.wire_dtype in slow_half_dtypes()


def context_of(kernels: Kernels, device: str) -> _Context:
    """Return a function that returns the context in which this thread computes with `kernels`."""
    if device != "cpu":
        return fast_arithmetic if kernels == "fast" else exact_arithmetic
    contexts: dict[Kernels, _Context] = {
        "exact": functools.partial(half_kernels, converted=False),
        "converted": converted_half_products,
        "fast": _fast_products,
    }
    return contexts[kernels]


@contextmanager
def _fast_products() -> Iterator[None]:
    with fast_single_products(), converted_half_products():
        yield
