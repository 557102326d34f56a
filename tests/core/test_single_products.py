"""The fast fp32 matrix product against that of torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headwater.core import single_products
from headwater.core.single_products import (
    FastMatmul,
    Product,
    fast_single_products,
    faster_products,
    onednn_product,
)

ALL = frozenset(Product)

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


class Counting(FastMatmul):
    """A mode that records the products that it is offered."""

    def __init__(self, products):
        super().__init__(products)
        self.seen = []

    def _takes(self, left, right):
        taken = super()._takes(left, right)
        if taken:
            self.seen.append(Product.of(left, right))
        return taken


def layer_and_input():
    torch.manual_seed(0)
    return nn.Linear(512, 384), torch.randn(256, 512, requires_grad=True)


def run(mode=None):
    layer, x = layer_and_input()
    if mode is None:
        layer(x).square().sum().backward()
    else:
        with mode:
            layer(x).square().sum().backward()
    return x.grad, layer.weight.grad, layer.bias.grad


def test_fast_products_of_a_linear_layer_are_equal_up_to_rounding():
    mode = Counting(ALL)
    for fast, exact in zip(run(mode), run(), strict=True):
        assert (fast - exact).norm() / exact.norm() < 1e-6
    assert set(mode.seen) == ALL


def test_products_that_are_not_faster_are_computed_by_torch():
    for fast, exact in zip(run(FastMatmul(frozenset())), run(), strict=True):
        assert torch.equal(fast, exact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_products_of_other_dtypes_are_computed_by_torch(dtype):
    x, w = torch.randn(256, 512, dtype=dtype), torch.randn(512, 384, dtype=dtype)
    with Counting(ALL) as mode:
        out = x @ w
    assert not mode.seen
    assert torch.equal(out, x @ w)


def test_small_products_are_computed_by_torch():
    with Counting(ALL) as mode:
        torch.randn(8, 8) @ torch.randn(8, 8)
    assert not mode.seen


def test_bias_is_added():
    x, w, bias = torch.randn(64, 32), torch.randn(32, 48), torch.randn(48)
    torch.testing.assert_close(onednn_product(x, w, bias), torch.addmm(bias, x, w))


@pytest.mark.parametrize("products", [ALL, frozenset()])
def test_no_operator_passes_through_python_if_torch_is_the_fastest(monkeypatch, products):
    monkeypatch.setattr(single_products, "faster_products", lambda: products)
    with fast_single_products() as mode:
        assert isinstance(mode, FastMatmul) == bool(products)


def test_faster_products_are_a_subset_of_all():
    assert faster_products() <= ALL
