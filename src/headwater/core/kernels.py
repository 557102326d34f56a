"""The kernels by which a run multiplies matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from headwater.core.arithmetic import Kernels, Matmul, exact_arithmetic, fast_arithmetic
from headwater.core.half_products import converted_half_products, slow_half_dtypes
from headwater.core.precision import Precision
from headwater.core.single_products import fast_single_products

_Context = Callable[[], AbstractContextManager[object]]


def choose_kernels(matmul: Matmul, precision: Precision, device: str, *, own_loop: bool) -> Kernels:
    """Return the kernels of a run.

    Args:
        matmul: what the user allows.
        precision: precision of the run.
        device: `cpu` or `cuda`.
        own_loop: True if the user's own loop trains. On a CPU it computes fp32 products by torch's kernels.
    """
    if device != "cpu":
        return "fast" if matmul == "fast" else "exact"
    if matmul == "fast" and not own_loop:
        return "fast"
    may_convert = matmul == "fast" or (matmul == "auto" and not own_loop)
    return "converted" if may_convert and precision.wire_dtype in slow_half_dtypes() else "exact"


def context_of(kernels: Kernels, device: str) -> _Context:
    """Return a function that returns the context in which this thread computes with `kernels`."""
    if device != "cpu":
        return fast_arithmetic if kernels == "fast" else exact_arithmetic
    contexts: dict[Kernels, _Context] = {
        "exact": nullcontext,
        "converted": converted_half_products,
        "fast": _fast_products,
    }
    return contexts[kernels]


@contextmanager
def _fast_products() -> Iterator[None]:
    with fast_single_products(), converted_half_products():
        yield
