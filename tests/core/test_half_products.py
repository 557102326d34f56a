"""Products of bf16 and fp16 by kernels of fp32, against products in fp64."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tests.plain_loss import plain_cross_entropy
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import headwater as hw
from children import exit_code_of_child
from headwater.api import engines
from headwater.core import half_products, kernels
from headwater.core.half_products import convert_half_products_everywhere
from headwater.core.precision import Precision
from headwater.core.warn_once import warn_once
from headwater.models.loss import linear_cross_entropy

HALF = [torch.bfloat16, torch.float16]


def assert_rounded(found, exact, dtype):
    """Check that a product was summed in fp32 and rounded once."""
    assert found.dtype == dtype and found.shape == exact.shape
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


def matrices(dtype, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("most_elements", [8 * 1024**2, 3000, 50], ids="in pieces of {}".format)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_products_are_rounded_once_whatever_their_pieces(dtype, most_elements, monkeypatch):
    monkeypatch.setattr(half_products, "_MOST_ELEMENTS", most_elements)
    left, right, added = matrices(dtype, (3, 37, 90), (3, 90, 53), (3, 37, 53))
    exact = left.double() @ right.double()
    one, several = torch.empty_like(added[0]), torch.empty_like(added)
    assert_rounded(half_products._product(left[0], right[0], None, 1, 1, one), exact[0], dtype)
    assert_rounded(half_products._products(left, right, None, 1, 1, several), exact, dtype)
    sums = 0.5 * added.double() - 2 * exact
    assert_rounded(half_products._product(left[0], right[0], added[0], 0.5, -2, one), sums[0], dtype)
    assert_rounded(half_products._products(left, right, added, 0.5, -2, several), sums, dtype)
    half_products._products(left, right, added, 0.5, -2, added)
    assert torch.equal(added, several)


def test_nothing_is_read_of_a_sum_whose_factor_is_zero():
    left, right, added = matrices(torch.bfloat16, (1, 4, 5), (1, 5, 3), (1, 4, 3))
    added.fill_(torch.nan)
    assert half_products._products(left, right, added, 0, 1, torch.empty_like(added)).isfinite().all()


def test_pieces_are_bounded():
    for sizes in ((2048, 768, 50257), (50257, 2048, 768), (2048, 50257, 768), (10**9, 1, 1), (1, 10**9, 1)):
        piece = half_products._piece(*sizes)
        assert half_products._elements(*piece) <= half_products._MOST_ELEMENTS
        assert all(1 <= part <= size for part, size in zip(piece, sizes, strict=True))
    assert half_products._piece(512, 768, 3072) == (512, 768, 3072)


@pytest.fixture
def slow(monkeypatch):
    """Make this module compute products in half precision on every processor."""
    monkeypatch.setattr(half_products, "slow_half_dtypes", lambda: frozenset(HALF))


def train_a_layer(dtype):
    convert_half_products_everywhere()
    weight, bias, inputs = matrices(dtype, (30, 90), (30,), (4, 7, 90))
    tensors = [each.requires_grad_() for each in (inputs, weight, bias)]
    exact = [each.detach().double().requires_grad_() for each in tensors]
    found, right = torch.nn.functional.linear(*tensors), torch.nn.functional.linear(*exact)
    assert_rounded(found, right.detach(), dtype)
    (upstream,) = matrices(dtype, found.shape)
    gradients = torch.autograd.grad(found, tensors, upstream)
    right_gradients = torch.autograd.grad(right, exact, upstream.double())
    for ours, expected in zip(gradients, right_gradients, strict=True):
        assert_rounded(ours, expected, dtype)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_torch_uses_these_products_forward_and_backward(slow, dtype):
    # In a child, because the kernels stay replaced.
    assert exit_code_of_child(train_a_layer, dtype) == 0


def compile_a_container():
    torch._dynamo.reset()
    counters.clear()  # this process may be a fork of one that has compiled
    convert_half_products_everywhere()
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)).bfloat16()
    model.compile(backend="eager")
    model(torch.ones(3, 9, dtype=torch.bfloat16)).sum().backward()
    assert not counters["frames"], "torch skips its own containers and layers, and here their products too"


def test_torch_does_not_compile_these_products(slow):
    assert exit_code_of_child(compile_a_container) == 0


class Products(TorchDispatchMode):
    """A mode that records the dtypes of all products that write to a given tensor."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.out, torch.ops.aten.addmm_.default, torch.ops.aten.addmm.out):
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def train_a_head(dtype, most_elements):
    half_products._MOST_ELEMENTS = most_elements
    convert_half_products_everywhere()
    hidden, weight = (each.requires_grad_() for each in matrices(dtype, (40, 90), (53, 90)))
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    targets, row_weights = torch.arange(40), torch.full((40,), 1 / 40)
    with Products() as products:
        loss = linear_cross_entropy(hidden, weight, None, targets, row_weights, chunk_rows=16)
    assert products.dtypes == {torch.float32}
    loss.backward()
    right = plain_cross_entropy(*exact, None, targets, row_weights)
    right.backward()
    torch.testing.assert_close(loss.double(), right, rtol=0.01, atol=0.0)
    for found, expected in zip((hidden, weight), exact, strict=True):
        error = (found.grad.double() - expected.grad).norm() / expected.grad.norm()
        assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("most_elements", [8 * 1024**2, 3000], ids="in pieces of {}".format)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_the_head_of_a_language_model_uses_these_products(slow, dtype, most_elements):
    assert exit_code_of_child(train_a_head, dtype, most_elements) == 0


HEADS = {
    "causal": (3, 3, None),
    "shared keys": (4, 2, None),
    "mask": (3, 3, (70, 70)),
    "mask of each sample": (3, 3, (2, 1, 70, 70)),
    "mask of each head": (3, 3, (1, 3, 70, 70)),
}


def gradients_of_attention(dtype, heads, key_heads, mask_shape):
    shapes = [(2, 70, count, 32) for count in (heads, key_heads, key_heads, heads)]
    *factors, upstream = (each.transpose(1, 2) for each in matrices(torch.bfloat16, *shapes))
    factors = [each.detach().to(dtype).requires_grad_() for each in factors]
    mask = None if mask_shape is None else matrices(torch.bfloat16, mask_shape)[0].to(dtype)
    output = torch.nn.functional.scaled_dot_product_attention(
        *factors, attn_mask=mask, is_causal=mask is None, enable_gqa=heads != key_heads
    )
    return torch.autograd.grad(output, factors, upstream.to(dtype))


def attend_backward(dtype):
    torch.set_num_threads(1)  # threads of the parent do not exist in a fork
    torchs = {name: gradients_of_attention(dtype, *case) for name, case in HEADS.items()}
    exact = {name: gradients_of_attention(torch.float32, *case) for name, case in HEADS.items()}
    convert_half_products_everywhere()
    for most_elements in (8 * 1024**2, 100):
        half_products._MOST_ELEMENTS = most_elements
        for name, case in HEADS.items():
            for found, former, right in zip(
                gradients_of_attention(dtype, *case), torchs[name], exact[name], strict=True
            ):
                assert found.dtype == dtype and found.stride() == former.stride()
                assert (found - right).norm() <= 1.1 * (former - right).norm()
    for name, case in HEADS.items():
        assert all(map(torch.equal, gradients_of_attention(torch.float32, *case), exact[name]))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradients_of_attention_are_as_exact_as_those_of_torch(slow, dtype):
    assert exit_code_of_child(attend_backward, dtype) == 0


def test_temporary_tensors_of_attention_are_bounded(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    query = torch.empty(2, 9, 16384, 64, device="meta")
    parts = [part for part, _ in half_products._parts_of_attention(query, query)]
    assert [part[1].stop - part[1].start for part in parts] == 2 * [2, 2, 2, 2, 1]
    assert sorted({part[0].start for part in parts}) == [0, 1]
    # Three heads share the keys of a head.
    parts = [(part[1], keys[1]) for part, keys in half_products._parts_of_attention(query, query[:, ::3])]
    assert parts == 2 * [(slice(3 * head, 3 * head + 3), slice(head, head + 1)) for head in range(3)]


def test_the_head_uses_the_products_of_torch_where_they_are_not_replaced(monkeypatch):
    monkeypatch.setattr(half_products, "_product", None)
    left, right, total = matrices(torch.bfloat16, (20, 30), (30, 10), (20, 10))
    out, expected = torch.empty_like(total), torch.addmm(total, left, right, beta=0.5)
    half_products.multiply_into(out, left, right)
    assert torch.equal(out, left @ right)
    half_products.add_product(total, left, right, beta=0.5)
    assert torch.equal(total, expected)


def test_other_products_keep_their_bits_and_errors(slow):
    multiply, multiply_all = (half_products.product_kernel(each, None) for each in (torch.mm, torch.bmm))
    add, add_all = (half_products.sum_kernel(each, None) for each in (torch.addmm, torch.baddbmm))
    left, right, added = matrices(torch.float32, (3, 20, 30), (3, 30, 10), (10,))
    assert torch.equal(multiply(left[0], right[0]), left[0] @ right[0])
    found = add(added, left[0], right[0], beta=0.5, alpha=2)
    assert torch.equal(found, torch.addmm(added, left[0], right[0], beta=0.5, alpha=2))
    assert torch.equal(multiply_all(left, right), left @ right)
    found = add_all(added, left, right, beta=0.5, alpha=2)
    assert torch.equal(found, torch.baddbmm(added, left, right, beta=0.5, alpha=2))
    for dtype in (torch.float32, *HALF):
        left, right = (each.to(dtype) for each in (left, right))
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            multiply(left[0], right[0].t())
        with pytest.raises(RuntimeError, match="same dtype"):
            multiply(left[0], right[0].double())
        assert multiply(left[0][:0], right[0]).shape == (0, 10)
        assert multiply(left[0][:, :0], right[0][:0]).eq(0).all()


def products_in_and_outside_of_the_context():
    torch.set_num_threads(1)  # threads of the parent do not exist in a fork
    left, right = matrices(torch.bfloat16, (30, 90), (90, 53))
    torchs, computed = left @ right, []

    def counting(*sizes):
        computed.append(sizes)
        return piece(*sizes)

    piece, half_products._piece = half_products._piece, counting
    with half_products.converted_half_products():
        left @ right
        assert len(computed) == 1
        with ThreadPoolExecutor() as pool:
            assert torch.equal(pool.submit(torch.mm, left, right).result(), torchs)
    assert torch.equal(left @ right, torchs) and len(computed) == 1


def test_other_threads_and_later_products_have_the_bits_of_torch(slow):
    assert exit_code_of_child(products_in_and_outside_of_the_context) == 0


def multiply_in_each_context():
    left, right = matrices(torch.bfloat16, (30, 90), (90, 53))
    torchs = left @ right
    convert_half_products_everywhere()
    half_products._piece = None  # a converted product raises an error
    with kernels.context_of("exact", "cpu")():
        assert torch.equal(left @ right, torchs)
    for context in (kernels.context_of("converted", "cpu"), nullcontext):
        with context(), pytest.raises(TypeError):
            left @ right


def test_an_exact_run_after_a_fast_loop_in_the_same_process_has_the_bits_of_torch(slow):
    assert exit_code_of_child(multiply_in_each_context) == 0


@pytest.mark.parametrize("matmul", ["auto", "exact", "fast"])
def test_own_loops_in_half_precision_use_them_if_products_may_be_fast(slow, slow_choice, matmul, monkeypatch):
    calls = []
    monkeypatch.setattr(engines, "convert_half_products_everywhere", lambda: calls.append("used"))
    train_a_streamed_layer(matmul, torch.bfloat16)
    assert bool(calls) == (matmul == "fast")


@pytest.fixture
def slow_choice(monkeypatch):
    """Makes runs choose their kernels as on a processor without instructions for half precision."""
    monkeypatch.setattr(kernels, "slow_half_dtypes", lambda: frozenset(HALF))


def train_a_streamed_layer(matmul, dtype):
    model = hw.compile(torch.nn.Linear(4, 4), hw.backend("CSX", matmul=matmul))
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        model(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("matmul", "dtype", "warnings"),
    [
        ("auto", torch.bfloat16, 1),
        ("exact", torch.bfloat16, 1),
        ("fast", torch.bfloat16, 0),
        ("exact", torch.float32, 0),
    ],
    ids=str,
)
def test_slow_products_cause_one_warning(slow_choice, monkeypatch, caplog, matmul, dtype, warnings):
    monkeypatch.setattr(engines, "convert_half_products_everywhere", lambda: None)
    warn_once.cache_clear()
    train_a_streamed_layer(matmul, dtype)
    train_a_streamed_layer(matmul, dtype)
    assert caplog.text.count("no instructions for bf16") == warnings


def test_an_own_loop_that_another_model_makes_inexact_causes_a_warning(slow_choice, monkeypatch, caplog):
    monkeypatch.setattr(engines, "converts_half_products", lambda: True)
    warn_once.cache_clear()
    train_a_streamed_layer("exact", torch.bfloat16)
    assert "fp32 kernels multiply matrices in bf16 for this model too" in caplog.text


def test_other_processors_cause_no_warning(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "slow_half_dtypes", frozenset)
    warn_once.cache_clear()
    train_a_streamed_layer("exact", torch.bfloat16)
    assert "no instructions" not in caplog.text


def test_kernels_follow_option_precision_device_and_loop(slow_choice):
    def chosen(matmul, name, device="cpu"):
        precision = Precision(name)
        return [
            kernels.choose_kernels(matmul, precision, device, own_loop=own_loop) for own_loop in (False, True)
        ]

    assert chosen("auto", "bf16") == ["converted", "exact"]
    assert chosen("auto", "fp32") == chosen("exact", "bf16") == chosen("exact", "fp32") == ["exact", "exact"]
    assert chosen("fast", "bf16") == ["fast", "converted"]
    assert chosen("fast", "fp32") == ["fast", "exact"]
    assert chosen("auto", "bf16", "cuda") == ["exact", "exact"]
    assert chosen("fast", "bf16", "cuda") == ["fast", "exact"]


FEATURES = {
    "AVX-512": ({"avx512f"}, True),
    "AVX-512 BF16": ({"avx512f", "avx512_bf16"}, False),
    "AMX": ({"avx512f", "avx512_bf16", "amx_bf16"}, False),
    "unknown": (set(), False),
}


@pytest.mark.parametrize("name", FEATURES)
def test_emulated_products_in_bf16_are_slow(name, monkeypatch):
    flags, is_slow = FEATURES[name]
    monkeypatch.setattr(half_products, "processor_flags", lambda: frozenset(flags))
    monkeypatch.setattr(half_products.platform, "machine", lambda: "x86_64")
    library = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: True, _is_mkldnn_fp16_supported=lambda: True)
    monkeypatch.setattr(torch.ops, "mkldnn", library)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert half_products.slow_half_dtypes.__wrapped__() == ({torch.bfloat16} if is_slow else set())
