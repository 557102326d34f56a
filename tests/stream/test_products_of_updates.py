"""Updates by optimizers that multiply matrices in bf16: the thread that runs them does not decide how."""

import dataclasses

import pytest
import torch
from harness import FP32, SEED, Job, Setting, make_plan
from torch import nn
from torch.optim import _muon

from headwater.core.modes import converts_half_products
from headwater.optim.spec import OptimizerSpec
from headwater.stream.engine import Engine


def layers():
    return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))


def batch(step, index):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(step))


def loss_of(model, inputs):
    return model(inputs).square().mean()


MUON = Job(layers, batch, loss_of, OptimizerSpec("Muon", {"lr": 0.01}))


@pytest.mark.parametrize("kernels", ["exact", "converted"])
def test_updates_in_a_forward_and_outside_of_it_multiply_by_the_same_kernels(kernels, tmp_path, monkeypatch):
    found, orthogonal = [], _muon._zeropower_via_newtonschulz

    def recorded(*args):
        found.append(converts_half_products())
        return orthogonal(*args)

    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", recorded)
    model = MUON.model()
    plan = dataclasses.replace(
        make_plan(MUON, model, Setting(in_place=True, precision=FP32), tmp_path), kernels=kernels
    )
    with Engine(model, plan, MUON.optimizer, seed=SEED, loss_function=loss_of) as engine:
        engine.train_step(MUON.batches(1), MUON.update(1))
        found.clear()
        engine.evaluate(batch(2, 0))  # its forward runs the updates
        in_forward = list(found)
        engine.train_step(MUON.batches(2), MUON.update(2))
        found.clear()
        assert len(dict(engine.named_masters())) == 3
    assert in_forward == found == 3 * [False]
