"""Products of layers with a mask: the kernel compared with fp64 and with torch's products."""

import functools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from headwater.models.layers.linear import Linear, LinearAfter, replaced_products
from headwater.models.layers.products import linear
from headwater.models.layers.replaced import replaced
from headwater.sparsity import products
from headwater.sparsity.masks import PackedMask
from headwater.sparsity.products import MaskedProducts, largest_kept_share

# Rows, inputs, outputs, share of kept weights. A tile of the kernel has 64 or 128 rows, and a panel 128 or 64
# numbers.
SHAPES = [
    (1, 8, 8, 0.5),
    (63, 8, 264, 0.3),
    (64, 128, 128, 0.25),
    (65, 136, 24, 0.1),
    (200, 72, 1032, 0.05),
    (257, 520, 136, 0.9),
    (130, 256, 64, 0.0),
    (129, 64, 192, 1.0),
]
DTYPES = [torch.float32, torch.bfloat16]

pytestmark = pytest.mark.skipif(products._library() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Compute every product by the kernel."""
    monkeypatch.setattr(products, "_is_faster", lambda *_: True)


@pytest.fixture
def computed(monkeypatch):
    """Counts the products of the kernel by name."""
    found, product = Counter(), products._product

    def counted(name, *args, **options):
        found[name] += 1
        return product(name, *args, **options)

    monkeypatch.setattr(products, "_product", counted)
    return found


def drawn(rows, inputs, outputs, share, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + inputs)
    mask = torch.rand(outputs, inputs, generator=generator) < share
    shapes = (rows, inputs), (outputs, inputs), (outputs,), (rows, outputs)
    x, weight, bias, gradient = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return mask, x, weight * mask, bias, gradient


def masked(mask, *, all_gradients=False):
    packed = PackedMask(mask)
    return MaskedProducts(lambda: packed, lambda: all_gradients)


def error(found, right):
    return ((found.double() - right).norm() / right.norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errors_are_those_of_torchs_products(shape, dtype):
    mask, x, weight, bias, gradient = drawn(*shape, dtype)
    ours, wide = masked(mask), [each.double() for each in (x, weight, bias, gradient)]
    for found, theirs, right in [
        (ours.forward(x, weight, bias), F.linear(x, weight, bias), F.linear(*wide[:3])),
        (ours.forward(x, weight, None), F.linear(x, weight), F.linear(*wide[:2])),
        (ours.input_gradient(gradient, weight), gradient @ weight, wide[3] @ wide[1]),
        (ours.weight_gradient(gradient, x), (gradient.t() @ x) * mask, (wide[3].t() @ wide[0]) * mask),
    ]:
        assert found.dtype == dtype and found.shape == theirs.shape
        # Lanes of a vector add up apart, so an error is at most a few times that of torch.
        assert error(found, right) <= 4 * error(theirs, right) + torch.finfo(dtype).eps / 2
    assert not ours.weight_gradient(gradient, x)[~mask].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(dtype):
    mask, x, weight, bias, gradient = drawn(300, 264, 520, 0.2, dtype)
    ours, threads, found = masked(mask), torch.get_num_threads(), []
    try:
        for count in (1, 3, 7):
            torch.set_num_threads(count)
            found.append(
                [
                    ours.forward(x, weight, bias),
                    ours.input_gradient(gradient, weight),
                    ours.weight_gradient(gradient, x),
                ]
            )
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_numbers_that_are_not_finite_stay_and_infinity_meets_no_masked_weight():
    mask, x, weight, _, _ = drawn(64, 64, 64, 0.5)
    x[3, 5] = torch.inf
    x[4, 5] = torch.nan
    found = masked(mask).forward(x, weight, None)
    reached = mask[:, 5]
    assert found[3, reached].isinf().all() and found[4, reached].isnan().all()
    assert found[3:5, ~reached].isfinite().all()
    assert masked(mask).forward(x.bfloat16(), weight.bfloat16(), None)[4, reached].isnan().all()


def test_layers_use_the_products_until_they_are_restored(computed):
    mask, x, weight, bias, _ = drawn(100, 128, 64, 0.25)
    for layer in (nn.Linear(128, 64), Linear(128, 64)):
        layer.weight.data, layer.bias.data = weight, bias
        with replaced([replaced_products(layer, masked(mask))]):
            torch.testing.assert_close(layer(x), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
            assert computed.pop("masked_forward") == 1
        assert torch.equal(layer(x), F.linear(x, weight, bias)) and not computed


def test_a_forward_that_the_user_has_replaced_is_left_alone():
    mask, x, weight, _, _ = drawn(64, 128, 64, 0.25)
    layer = nn.Linear(128, 64, bias=False)
    layer.weight.data = weight
    layer.forward = doubled = lambda input: F.linear(input, layer.weight) * 2
    with replaced([replaced_products(layer, masked(mask))]):
        assert torch.equal(layer(x), 2 * F.linear(x, weight))
    assert layer.forward is doubled


def test_a_layer_that_does_more_with_its_weight_is_left_alone():
    class Scaled(nn.Linear):
        def forward(self, input):
            return super().forward(input) * 2

    ours = masked(torch.ones(8, 8, dtype=torch.bool))
    assert replaced_products(Scaled(8, 8), ours) is None
    assert replaced_products(nn.LayerNorm(8), ours) is None


@pytest.mark.parametrize("all_gradients", [False, True])
@pytest.mark.parametrize("after", [False, True], ids=["plain", "after a function"])
def test_gradients_are_those_of_the_plain_layer(after, all_gradients, computed):
    mask, x, weight, bias, _ = drawn(96, 128, 64, 0.25)
    layer = LinearAfter(F.gelu, 128, 64, bias=True) if after else Linear(128, 64)
    layer.weight.data, layer.bias.data = weight.clone(), bias.clone()
    inputs, options = x.view(4, 24, 128).requires_grad_(), {"apply_function": True} if after else {}

    def gradients():
        loss = layer(inputs, **options).square().sum()
        return torch.autograd.grad(loss, [inputs, layer.weight, layer.bias])

    theirs = gradients()
    with replaced([replaced_products(layer, masked(mask, all_gradients=all_gradients))]):
        ours = gradients()
    names = ["masked_forward", "masked_input_gradient", "masked_weight_gradient"]
    assert computed == dict.fromkeys(names[: 2 if all_gradients else 3], 1)
    if not all_gradients:
        assert not ours[1][~mask].any()
        theirs = (theirs[0], theirs[1] * mask, theirs[2])
    for found, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_outputs_may_be_changed_in_place():
    mask, x, weight, bias, _ = drawn(96, 128, 64, 0.25)
    inputs, weight, found = x.view(4, 24, 128), weight.requires_grad_(), []
    for multiply in (functools.partial(linear, masked(mask)), F.linear):
        loss = multiply(inputs, weight, bias).relu_().square().sum()
        found.append(torch.autograd.grad(loss, weight)[0] * mask)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64)], ids=str)
def test_a_batch_without_rows_has_zero_gradients(shape):
    mask, _, weight, bias, _ = drawn(64, 64, 32, 0.25)
    x, leaves = torch.empty(shape, requires_grad=True), [weight.requires_grad_(), bias.requires_grad_()]
    output = linear(masked(mask), x, *leaves)
    gradients = torch.autograd.grad(output.sum(), [x, *leaves])
    assert output.shape == (*shape[:-1], 32) and [each.shape for each in gradients[1:]] == [(32, 64), (32,)]
    assert not any(each.any() for each in gradients)


def test_arguments_that_do_not_fit_get_torchs_errors():
    mask, x, weight, bias, _ = drawn(64, 128, 64, 0.25)
    ours = masked(mask)
    for arguments in [
        (x[:, :120], weight, bias),
        (torch.cat([x, x], -1), weight, None),
        (x[0, 0], weight, None),
        (x, weight, bias[:32]),
        (x, weight, bias.double()),
    ]:
        with pytest.raises(RuntimeError) as torchs:
            F.linear(*arguments)
        with pytest.raises(RuntimeError) as found:
            ours.forward(*arguments)
        assert str(found.value) == str(torchs.value)


def test_a_bias_of_one_number_is_added_to_all_outputs():
    mask, x, weight, bias, _ = drawn(64, 128, 64, 0.25)
    assert torch.equal(masked(mask).forward(x, weight, bias[:1]), F.linear(x, weight, bias[:1]))


def test_defaults_of_the_user_do_not_matter():
    mask, x, weight, bias, gradient = drawn(300, 264, 520, 0.2)
    ours, found = masked(mask), []
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.float64, "meta")):
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                forward = ours.forward(x, weight, bias)
                found.append(
                    (forward, ours.input_gradient(gradient, weight), ours.weight_gradient(gradient, x))
                )
        finally:
            torch.set_default_dtype(torch.float32)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_compilers_and_transforms_of_functions_see_torchs_product():
    mask, x, weight, bias, _ = drawn(64, 64, 64, 0.25)
    ours = masked(mask)
    assert torch.equal(torch.vmap(lambda row: linear(ours, row, weight, bias))(x), F.linear(x, weight, bias))


def test_small_and_unusual_products_are_torchs(monkeypatch):
    monkeypatch.undo()  # the real `_is_faster`
    monkeypatch.setattr(products, "largest_kept_share", lambda dtype: 0.5)
    for rows, inputs, outputs, share, dtype in [
        (2048, 512, 512, 0.9, torch.float32),  # too many kept weights
        (63, 512, 512, 0.1, torch.float32),  # few rows
        (64, 64, 64, 0.1, torch.float32),  # a small product
        (2048, 512, 508, 0.1, torch.float32),  # not a multiple of 8
        (2048, 512, 512, 0.1, torch.float64),
        (2048, 512, 512, 0.1, torch.float16),
    ]:
        mask, x, weight, bias, _ = drawn(rows, inputs, outputs, share, dtype)
        assert not products._is_faster(PackedMask(mask), x, weight)
        assert torch.equal(masked(mask).forward(x, weight, bias), F.linear(x, weight, bias))
    mask, x, weight, _, _ = drawn(2048, 512, 512, 0.1)
    assert products._is_faster(PackedMask(mask), x, weight)
    assert not products._is_faster(PackedMask(mask), x, weight.double())
    assert not products._is_faster(PackedMask(mask), x.to("meta"), weight)
    assert not products._is_faster(PackedMask(mask), torch._neg_view(x), weight)


def test_without_the_kernel_a_mask_that_keeps_nothing_is_torchs_too(monkeypatch):
    monkeypatch.undo()  # the real `_is_faster`
    mask, x, weight, bias, _ = drawn(2048, 512, 512, 0.0)
    monkeypatch.setattr(products, "_library", lambda: None)
    monkeypatch.setattr(products, "largest_kept_share", products.largest_kept_share.__wrapped__)
    assert torch.equal(masked(mask).forward(x, weight, bias), F.linear(x, weight, bias))


def test_the_share_is_measured():
    share = largest_kept_share(torch.float32)
    assert 0 < share <= 1
    assert share == largest_kept_share(torch.float32), "once in a process"
