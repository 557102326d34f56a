"""Models with Triton kernels: the dry run does not launch them, because its tensors are in host memory."""

import sys
import types

import pytest
import torch
from torch import nn

from headwater.plan.trace import trace_step
from headwater.plan.triton_kernels import without_triton_kernels


class KernelInterface:
    """A stand-in for the class of Triton that has this name; tests run without Triton and a GPU."""

    def __init__(self, run):
        self.run = run

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, **kwargs)


@pytest.fixture
def triton(monkeypatch):
    module = types.ModuleType("triton.runtime.jit")
    module.KernelInterface = KernelInterface
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", module)


def scale(x, out, factor, *, grid):
    assert grid == (1,)
    out.copy_(torch.from_numpy(factor * x.numpy()))


KERNEL = KernelInterface(scale)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        KERNEL[(1,)](x, out, factor=2.0)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return Scale.apply(gradient)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = Scale.apply(layer(x))
        return x


def test_a_dry_run_does_not_launch_kernels(triton):
    trace = trace_step(Scaled(), torch.randn(3, 4), loss_function=lambda model, x: model(x).sum())
    assert [cost.forward.flops for cost in trace.costs] == [2 * 3 * 4 * 4] * 2


def test_kernels_with_real_tensors_run_beside_a_dry_run(triton):
    x = torch.randn(4)
    with without_triton_kernels():
        assert torch.equal(Scale.apply(x), 2 * x)
    assert torch.equal(Scale.apply(x), 2 * x)
