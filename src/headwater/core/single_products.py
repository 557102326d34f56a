"""Matrix products in fp32 on the CPU, computed by MKL or oneDNN, whichever is faster.

torch computes fp32 products with MKL. On processors that are not Intel's, MKL has about half the speed of
oneDNN, and the results differ by rounding (about 1e-6). A measurement, made once, decides which library is
used for each of the three products of a linear layer.
"""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PROBE = (1024, 768, 1536)  # rows, inner dimension, columns of the timed products
_WORTH_IT = 1.1  # minimum speed of oneDNN relative to MKL
_SMALLEST_FLOPS = 1 << 24  # below this, the Python overhead exceeds the gain


class Product(enum.Enum):
    """The kinds of matrix product in a linear layer. They differ in which factor is transposed in memory."""

    FORWARD = "x @ w.T"
    INPUT_GRADIENT = "g @ w"
    WEIGHT_GRADIENT = "g.T @ x"

    @classmethod
    def of(cls, left: torch.Tensor, right: torch.Tensor) -> Product:
        """Return the kind of the product `left @ right`."""
        if not left.is_contiguous():
            return cls.WEIGHT_GRADIENT
        return cls.INPUT_GRADIENT if right.is_contiguous() else cls.FORWARD


def onednn_product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `left @ right + bias` of fp32 matrices, computed by oneDNN.

    Args:
        left: [rows, inner].
        right: [inner, columns].
        bias: [columns]; no bias if not given.

    Returns:
        [rows, columns].
    """
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")
    return out


class FastMatmul(TorchDispatchMode):
    """A context in which oneDNN computes some products.

    Args:
        products: the products for oneDNN.
    """

    def __init__(self, products: frozenset[Product]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = products

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not kwargs and func is torch.ops.aten.mm.default and self._takes(*args):
            return onednn_product(*args)
        if not kwargs and func is torch.ops.aten.addmm.default:
            bias, left, right = args
            if bias.dim() == 1 and self._takes(left, right):
                return onednn_product(left, right, bias)
        return func(*args, **kwargs)

    def _takes(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        return (
            left.dtype == right.dtype == torch.float32
            and left.device.type == "cpu"
            and 2 * left.shape[0] * left.shape[1] * right.shape[1] >= _SMALLEST_FLOPS
            and Product.of(left, right) in self.products
        )


def fast_single_products() -> AbstractContextManager[object]:
    """Return the context of `matmul: fast` on a CPU. It has no effect if oneDNN is not faster."""
    products = faster_products()
    return FastMatmul(products) if products else nullcontext()


@functools.cache
def faster_products() -> frozenset[Product]:
    """Return the products for which oneDNN is clearly faster than torch's default on this machine."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    rows, inner, columns = _PROBE
    generator = torch.Generator().manual_seed(0)
    x, w, g = (
        torch.randn(shape, dtype=torch.float32, generator=generator, device="cpu")
        for shape in ((rows, inner), (columns, inner), (rows, columns))
    )
    pairs = {Product.FORWARD: (x, w.t()), Product.INPUT_GRADIENT: (g, w), Product.WEIGHT_GRADIENT: (g.t(), x)}
    return frozenset(product for product, pair in pairs.items() if _gain(*pair) > _WORTH_IT)


def _gain(left: torch.Tensor, right: torch.Tensor) -> float:
    """Time both libraries in turn. Return the speed of oneDNN divided by that of torch's default."""
    # Both are timed in turn, so that a change of the clock rate affects both.
    times = [(_seconds(torch.mm, left, right), _seconds(onednn_product, left, right)) for _ in range(6)]
    return min(default for default, _ in times) / min(onednn for _, onednn in times)


def _seconds(multiply: Callable[..., torch.Tensor], left: torch.Tensor, right: torch.Tensor) -> float:
    start = time.perf_counter()
    multiply(left, right)
    return time.perf_counter() - start
