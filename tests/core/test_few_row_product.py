"""Linear layers of few rows: the kernel compared with fp64 and with torch's products.

On a machine without a C compiler `few_row_linear` is torch's, so the comparisons with fp64 hold everywhere.
"""

import ctypes
import threading

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from headwater.core import few_rows
from headwater.core.few_rows import MOST_ROWS_OF_DTYPE, few_row_linear, few_row_product_available
from headwater.core.threads import openmp_library

SHAPES = [  # rows, inputs, outputs
    (1, 1, 1),
    (1, 16, 4),
    (1, 513, 1023),
    (2, 7, 5),
    (3, 64, 258),
    (4, 100, 6),
    (5, 33, 130),
    (6, 512, 2048),
    (7, 31, 3),
    (8, 2048, 512),
]
DTYPES = [torch.float32, torch.bfloat16]

needs_kernel = pytest.mark.skipif(not few_row_product_available(), reason="no C compiler")


def drawn(rows, inputs, outputs, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows + inputs)
    shapes = (rows, inputs), (outputs, inputs), (outputs,)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def product(*arguments):
    with torch.no_grad():
        return few_row_linear(*arguments)


def error(found, right):
    return ((found.double() - right).norm() / right.norm()).item()


@pytest.fixture
def no_torch(monkeypatch):
    """Make every call of torch's product an error."""

    def fail(*_):
        raise AssertionError("computed by torch")

    monkeypatch.setattr(few_rows.F, "linear", fail)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_errors_are_those_of_torchs_product(shape, has_bias, dtype):
    x, weight, bias = drawn(*shape, dtype)
    bias = bias if has_bias else None
    right = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found, theirs = product(x, weight, bias), F.linear(x, weight, bias)
    assert found.dtype == dtype and found.shape == theirs.shape
    assert error(found, right) <= max(1.5 * error(theirs, right), torch.finfo(dtype).eps / 2)


def test_a_bias_of_one_number_is_added_to_all_columns():
    x, weight, bias = drawn(2, 64, 258)
    assert torch.equal(product(x, weight, bias[:1]), F.linear(x, weight, bias[:1]))


@needs_kernel
@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 1), (16, 3), (32, 97), (1100, 777)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_depend_neither_on_other_rows_nor_on_the_number_of_threads(dtype, inputs, outputs):
    most = MOST_ROWS_OF_DTYPE[dtype]
    x, weight, bias = drawn(most, inputs, outputs, dtype)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found += [product(x[:rows], weight, bias) for rows in range(1, most + 1)]
    finally:
        torch.set_num_threads(before)
    alone = torch.cat([product(row, weight, bias) for row in x.split(1)])
    for each in found:
        assert torch.equal(each, alone[: len(each)])


@needs_kernel
@pytest.mark.usefixtures("no_torch")
def test_bf16_is_the_rounded_sum_in_fp32():
    for shape in SHAPES[:6]:
        arguments = drawn(*shape, torch.bfloat16)
        assert torch.equal(product(*arguments), product(*(each.float() for each in arguments)).bfloat16())


@needs_kernel
@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_are_not_finite_reach_the_result(dtype):
    x, weight, bias = drawn(3, 40, 9, dtype)
    x[0, 39], x[1, 0], weight[4, 5] = torch.nan, torch.inf, torch.nan
    found = product(x, weight, bias)
    assert found[0].isnan().all() and found[:, 4].isnan().all()
    assert found[1, [0, 1, 2, 3, 5, 6, 7, 8]].isinf().all() and found[2, :4].isfinite().all()


@needs_kernel
def test_a_weight_may_be_a_part_of_another_and_the_input_may_have_more_dimensions(no_torch):
    x, weight, bias = drawn(6, 24, 40)
    part = weight[8:16, 4:20]
    found = product(x[:, :16].contiguous().view(2, 3, 16), part, bias[8:16])
    assert torch.equal(found.flatten(0, 1), product(x[:, :16].contiguous(), part.contiguous(), bias[8:16]))


@needs_kernel
def test_autocast_rounds_as_torchs_product_does():
    x, weight, bias = drawn(2, 64, 48)
    weight = weight.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = product(x, weight, bias)
        assert torch.equal(product(x, weight.float(), bias), F.linear(x, weight.float(), bias))
    assert torch.equal(found, product(x.bfloat16(), weight, bias.bfloat16()))


@pytest.mark.parametrize("changed", ["input", "bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_autocast_does_not_cast_what_torchs_does_not(changed, dtype):
    x, weight, bias = drawn(2, 64, 48, torch.bfloat16)
    x, bias = (x.to(dtype), bias) if changed == "input" else (x, bias.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        for multiply in (F.linear, product):
            with pytest.raises(RuntimeError, match="same dtype"), torch.no_grad():
                multiply(x, weight, bias)


OTHER_CALLS = {
    "many rows": lambda x, weight, bias: (torch.cat([x] * 9), weight, bias),
    "fp64": lambda *arguments: [each.double() for each in arguments],
    "fp16": lambda *arguments: [each.half() for each in arguments],
    "strided input": lambda x, weight, bias: (torch.cat([x, x], 1)[:, ::2], weight, bias),
    "transposed weight": lambda x, weight, bias: (x, weight.t().contiguous().t(), bias),
    "no rows": lambda x, weight, bias: (x[:0], weight, bias),
    "sparse weight": lambda x, weight, bias: (x, weight.to_sparse_csr(), bias),
    "weight of oneDNN": lambda *arguments: [each.to_mkldnn() for each in arguments],
    "lazy sign": lambda x, weight, bias: (x, torch._neg_view(weight), bias),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("change", OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_other_calls_are_computed_by_torch(change):
    arguments = change(*drawn(1, 32, 8))
    found, theirs = product(*arguments), F.linear(*arguments)
    assert found.layout == theirs.layout and torch.equal(found.to_dense(), theirs.to_dense())


def derivative(multiply, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(multiply(forward_ad.make_dual(x, 2 * x))).tangent


TRANSFORMS = {
    "vmap": lambda multiply, x: torch.func.vmap(multiply)(x),
    "jvp": lambda multiply, x: torch.func.jvp(multiply, (x,), (x,))[1],
    "dual tensors": derivative,
    "trace": lambda multiply, x: torch.jit.trace(multiply, (x,), check_trace=False)(2 * x),
    "compiled as one graph": lambda multiply, x: torch.compile(multiply, backend="eager", fullgraph=True)(x),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_torch_computes_products_inside_of_transforms(transform):
    x, weight, bias = drawn(3, 32, 8)
    with torch.no_grad():
        expected = transform(lambda x: F.linear(x, weight, bias), x)
        assert torch.equal(transform(lambda x: few_row_linear(x, weight, bias), x), expected)


def test_torch_computes_products_that_a_dispatch_mode_counts():
    with FlopCounterMode(display=False) as counter:
        product(*drawn(3, 32, 8))
    assert counter.get_total_flops() == 2 * 3 * 32 * 8


@needs_kernel
def test_a_new_thread_uses_as_many_cores_as_torch():
    limits, openmp = [], ctypes.CDLL(str(openmp_library()))

    def multiply():
        limits.append(openmp.omp_get_max_threads())
        product(*drawn(1, 16, 4))
        limits.append(openmp.omp_get_max_threads())

    def of_new_thread():
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
        return limits.pop()

    of_new_thread()
    asked, before = limits.pop() + 2, torch.get_num_threads()
    torch.set_num_threads(asked)
    try:
        assert of_new_thread() == asked
    finally:
        torch.set_num_threads(before)


def test_torch_computes_products_that_need_a_gradient():
    x, weight, bias = drawn(1, 512, 80)
    weight.requires_grad_()
    found = few_row_linear(x, weight, bias)
    found.sum().backward()
    assert torch.equal(found, F.linear(x, weight, bias))
    assert torch.equal(weight.grad, x.expand(80, -1))
