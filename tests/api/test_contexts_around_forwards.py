"""Forwards inside a context, and their backward outside of it. A recomputed stage finds the context again."""

import contextlib
import types
from unittest import mock

import pytest
import torch
from any_loop import PLANS, Place, check, randn
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from headwater.core.torch_settings import TorchSettings

ops = types.ModuleType("ops_of_the_user")
"""A Python module of the user's code, with functions and state."""


class Block(nn.Module):
    """A stage with an attention, a convolution, and functions of a class and of two modules."""

    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.convolution = nn.Conv1d(8, 8, 5, padding=2)

    def activate(self, x):
        return torch.sigmoid(x)

    def forward(self, x):
        ops.calls += 1
        ops.lengths.append(len(x))
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.convolution(x.mT).mT * torch.tensor([1 / 3]).float()
        return F.gelu(torch.tanh(ops.activate(self.activate(self.out(x)))))


class FunctionMode(TorchFunctionMode):
    """A mode that changes the results of `torch.tanh`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 1.25 if func is torch.tanh else result


class DispatchMode(TorchDispatchMode):
    """A mode that changes the results of tanh."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 1.25 if func is torch.ops.aten.tanh.default else result


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def onednn(**settings):
    return torch.backends.mkldnn.flags(allow_tf32=None, **settings)  # TF32 is for GPUs of Intel only


def replaced(owner, name):
    """Return a function that makes a context, in which a function returns 1.25 times its results."""
    original = getattr(owner, name)
    return lambda: mock.patch.object(owner, name, lambda *args: original(*args) * 1.25)


CONTEXTS = {
    "kernel of attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "onednn": lambda: onednn(enabled=False),
    "default dtype": default_dtype,
    "function mode": FunctionMode,
    "dispatch mode": DispatchMode,
    "function of torch": replaced(torch, "tanh"),
    "function of torch's layers": replaced(F, "linear"),
    "method of the user": replaced(Block, "activate"),
    "forward of torch": replaced(nn.Linear, "forward"),
    "function of a module": lambda: mock.patch.object(ops, "activate", torch.sin),
}


PLANS["selective"] = {"tier": "memory", "num_slabs": 2, "activations": "selective"}


def train(place: Place, context, around_backward=contextlib.nullcontext):
    """Take steps whose forwards are inside the context, and whose backwards are inside another one."""
    ops.calls, ops.lengths, ops.activate = 0, [], torch.cos
    model = place.compile(nn.Sequential(*[Block() for _ in range(3)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        x = randn(2, 200, 8, seed=step)
        with context():
            loss = model(x).square().mean()
        optimizer.zero_grad()
        with around_backward():
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, ops.calls, ops.lengths


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_recomputed_forward_finds_the_context_of_its_first_run(context, tmp_path):
    check(lambda place: train(place, CONTEXTS[context]), "recompute", tmp_path)


@pytest.mark.parametrize("context", ["dispatch mode", "function of torch"])
def test_a_value_that_is_computed_again_is_that_of_the_forward(context, tmp_path):
    check(lambda place: train(place, CONTEXTS[context]), "selective", tmp_path)


@pytest.mark.parametrize("plan", ["recompute", "selective"])
def test_a_mode_around_the_backward_does_not_change_the_forward(plan, tmp_path):
    check(lambda place: train(place, contextlib.nullcontext, DispatchMode), plan, tmp_path)


def test_settings_and_modes_are_as_before_after_a_second_run():
    around, inside = FunctionMode(), DispatchMode()
    with around, inside, default_dtype(), onednn(enabled=False, fp32_precision="bf16"):
        first = TorchSettings()
    before = TorchSettings()
    with torch.device("cpu"):
        around_both = TorchSettings()
        with first.restored():
            within = TorchSettings()
            assert torch.get_default_dtype() == torch.bfloat16
            assert torch._C._get_fp32_precision_getter("mkldnn", "matmul") == "bf16"
        assert vars(TorchSettings()) == vars(around_both) != vars(before)
    after = TorchSettings()
    assert vars(within) == vars(first)
    assert vars(after) == vars(before) != vars(first)
    with onednn(enabled=True, fp32_precision="bf16"):  # still follows its backend
        assert torch._C._get_fp32_precision_getter("mkldnn", "matmul") == "bf16"
