"""The dry run refuses exactly the dtypes that torch refuses when it computes."""

import itertools

import pytest
import torch

from headwater.plan.capture.dtypes import dtype_problem
from headwater.plan.trace_recorder import OperatorCall

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def matrix(dtype):
    return torch.zeros(2, 2, dtype=dtype)


def vector(dtype):
    return torch.zeros(2, dtype=dtype)


CASES = {
    aten.mm.default: lambda a, b: (matrix(a), matrix(b)),
    aten.addmm.default: lambda a, b: (matrix(a), matrix(a), matrix(b)),
    aten.bmm.default: lambda a, b: (matrix(a)[None], matrix(b)[None]),
    aten.baddbmm.default: lambda a, b: (matrix(a)[None], matrix(a)[None], matrix(b)[None]),
    aten.mv.default: lambda a, b: (matrix(a), vector(b)),
    aten.dot.default: lambda a, b: (vector(a), vector(b)),
    aten.convolution.default: lambda a, b: (
        matrix(a)[None], matrix(b)[None], None, [1], [0], [1], False, [0], 1,
    ),
    aten.binary_cross_entropy.default: lambda a, b: (matrix(a), matrix(b)),
}  # fmt: skip

INDEXED = {
    aten.nll_loss_forward.default: lambda i: (matrix(torch.float32), vector(i), None, 1, -100),
    aten.nll_loss2d_forward.default: lambda i: (
        torch.zeros(2, 2, 1, 1),
        torch.zeros(2, 1, 1, dtype=i),
        None,
        1,
        -100,
    ),
    aten.gather.default: lambda i: (matrix(torch.float32), 0, matrix(i)),
    aten.scatter.src: lambda i: (matrix(torch.float32), 0, matrix(i), matrix(torch.float32)),
    aten.scatter_add.default: lambda i: (matrix(torch.float32), 0, matrix(i), matrix(torch.float32)),
    aten.index_add.default: lambda i: (matrix(torch.float32), 0, vector(i), matrix(torch.float32)),
    aten.index_select.default: lambda i: (matrix(torch.float32), 0, vector(i)),
}


def refuses(func, args):
    try:
        func(*args)
    except RuntimeError:
        return True
    return False


def told(func, args):
    return dtype_problem(OperatorCall(func, args, None, stage=0, flops=0, backward=False)) is not None


@pytest.mark.parametrize("func", CASES, ids=str)
def test_the_dry_run_refuses_the_float_dtypes_that_torch_refuses(func):
    for a, b in itertools.product(FLOATS, FLOATS):
        args = CASES[func](a, b)
        assert told(func, args) == refuses(func, args), (a, b)


@pytest.mark.parametrize("func", INDEXED, ids=str)
def test_the_dry_run_refuses_the_index_dtypes_that_torch_refuses(func):
    for dtype in INTEGERS:
        args = INDEXED[func](dtype)
        assert told(func, args) == refuses(func, args), dtype
