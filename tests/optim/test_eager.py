"""Optimizers without torch's compiler: the same bits, and no import of it."""

import subprocess
import sys

import pytest
import torch

from headwater.optim.catalog import FUSED, optimizers
from headwater.optim.eager import eager

QUICK = """
import sys, torch
from headwater.optim.spec import OptimizerSpec
param = torch.nn.Parameter(torch.ones(2))
optimizer = OptimizerSpec({name!r}, {{"lr": 0.1}}).build([param], to_compile=False)
param.grad = torch.ones(2)
optimizer.step()
assert param[0] < 1, param
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize("name", sorted(optimizers()))
def test_eager_steps_are_bit_identical(name):
    def trained(kind):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(5, 2))]
        options = {"fused": True} if name in FUSED["cpu"] else {}
        optimizer = kind([{"params": params[:1]}, {"params": params[1:], "lr": 0.02}], lr=0.01, **options)
        for _ in range(4):
            for param in params:
                gradient = torch.randn_like(param)
                param.grad = gradient.to_sparse(1) if name == "SparseAdam" else gradient
            optimizer.step()
        return params, [optimizer.state[param] for param in params]

    kind = optimizers()[name]
    for mine, theirs in zip(trained(eager(kind)), trained(kind), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert issubclass(eager(kind), kind)


@pytest.mark.parametrize("name", sorted(optimizers()))
def test_a_step_on_tensors_in_host_memory_asks_no_gpu_for_anything(name, monkeypatch):
    asked = []
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: bool(asked.append(name)))
    # Newer versions of torch ask for the accelerator first.
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: asked.append(name))
    param = torch.nn.Parameter(torch.randn(5, 2))
    param.grad = torch.ones(5, 2).to_sparse(1) if name == "SparseAdam" else torch.ones(5, 2)
    eager(optimizers()[name])([param], lr=0.01).step()
    assert asked == []


@pytest.mark.parametrize(
    ("fused", "dtype"), [(False, torch.float32), (True, torch.float32), (False, torch.complex64)]
)
def test_adagrad_creates_the_state_of_other_parameters(fused, dtype):
    def made(params):
        return eager(torch.optim.Adagrad)(params, initial_accumulator_value=0.5, fused=fused)

    params = [torch.nn.Parameter(torch.ones(2, 3, dtype=dtype)) for _ in range(2)]
    first, second = made(params[:1]), made([torch.nn.Parameter(torch.ones(1))])
    second.param_groups = [{**second.param_groups[0], "params": params[1:]}]
    second.state.clear()
    for _ in range(2):
        for param, optimizer in zip(params, (first, second), strict=True):
            param.grad = torch.full_like(param, 2)
            optimizer.step()
    assert torch.equal(*params)
    assert all(map(torch.equal, first.state[params[0]].values(), second.state[params[1]].values()))


@pytest.mark.real_start
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lamb"])
def test_the_compiler_is_not_imported(name):
    done = subprocess.run([sys.executable, "-c", QUICK.format(name=name)], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
