"""Matrix products in fp32 by whichever library is faster on this machine.

torch gives fp32 products to MKL, which on processors of other makers than its own runs at half of what oneDNN
reaches with the same result to rounding (about 1e-6). Which of the two is faster, and for which of the three
products of a linear layer, is measured once and not assumed.
"""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PROBE = (1024, 768, 1536)  # rows, inner, columns of the products that are timed
_WORTH_IT = 1.1  # how much faster oneDNN must be
_SMALLEST_FLOPS = 1 << 24  # below, the detour through Python costs more than it gains


class Product(enum.Enum):
    """The products of a linear layer, told apart by which factor is transposed in memory."""

    FORWARD = "x @ w.T"
    INPUT_GRADIENT = "g @ w"
    WEIGHT_GRADIENT = "g.T @ x"

    @classmethod
    def of(cls, left: torch.Tensor, right: torch.Tensor) -> Product:
        """Which one `left @ right` looks like."""
        if not left.is_contiguous():
            return cls.WEIGHT_GRADIENT
        return cls.INPUT_GRADIENT if right.is_contiguous() else cls.FORWARD


def onednn_product(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`left @ right + bias` of fp32 matrices through oneDNN."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, right.t(), bias, "none", [], "")
    return out


class FastMatmul(TorchDispatchMode):
    """Within it the products in `products` go through oneDNN.

    Args:
        products: which; by default those that are faster there.
    """

    def __init__(self, products: frozenset[Product] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = faster_products() if products is None else products

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


@functools.cache
def faster_products() -> frozenset[Product]:
    """The products for which oneDNN is clearly faster than torch's default on this machine."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    rows, inner, columns = _PROBE
    generator = torch.Generator().manual_seed(0)
    x, w, g = (
        torch.randn(shape, generator=generator)
        for shape in ((rows, inner), (columns, inner), (rows, columns))
    )
    pairs = {Product.FORWARD: (x, w.t()), Product.INPUT_GRADIENT: (g, w), Product.WEIGHT_GRADIENT: (g.t(), x)}
    return frozenset(product for product, pair in pairs.items() if _gain(*pair) > _WORTH_IT)


def _gain(left: torch.Tensor, right: torch.Tensor) -> float:
    """How many times faster oneDNN is; both are timed in turn, the best of each counts."""
    times = [(_seconds(torch.mm, left, right), _seconds(onednn_product, left, right)) for _ in range(6)]
    return min(default for default, _ in times) / min(onednn for _, onednn in times)


def _seconds(multiply: Callable[..., torch.Tensor], left: torch.Tensor, right: torch.Tensor) -> float:
    start = time.perf_counter()
    multiply(left, right)
    return time.perf_counter() - start
