"""Operations of trainers on optimizers and parameters are equal on streamed and plain weights."""

import importlib
import sys

import pytest
import torch
from places import assert_same_tensors, backend, every_plan
from torch import nn

import headwater
from headwater.api.compile import streamed
from headwater.core.errors import ConfigError


def net(num_inputs=8, num_outputs=4):
    torch.manual_seed(num_inputs)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Linear(num_inputs, 16), *blocks, nn.Linear(16, num_outputs))


def inputs_of(step, width=8):
    return torch.randn(4, width, generator=torch.Generator().manual_seed(step))


def place_of(plan, tmp_path):
    """Return a function that compiles a model for a plan, or leaves it plain without a plan."""
    return (
        (lambda model: model)
        if plan is None
        else lambda model: headwater.compile(model, backend(plan, tmp_path))
    )


@every_plan
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("clips", [False, True])
def test_grad_scaler_of_torch(optimizer_class, clips, plan, tmp_path):
    """A fused optimizer unscales and skips by itself; the first two steps overflow."""

    def run(place):
        model = place(net())
        optimizer = optimizer_class(model.parameters(), lr=1e-2, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
        seen = []
        for step in range(10):
            optimizer.zero_grad()
            loss = model(inputs_of(step)).square().mean()
            scaler.scale(loss * (torch.inf if step < 2 else 1)).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen.append((loss.item(), scaler.get_scale()))
        return seen, model.state_dict()

    ours, plain = run(place_of(plan, tmp_path)), run(place_of(None, tmp_path))
    assert [scale for _, scale in plain[0]][:6] == [2.0**15, 2.0**14, 2.0**14, 2.0**14, 2.0**15, 2.0**15]
    assert ours[0] == plain[0]
    assert_same_tensors(ours[1], plain[1])


@every_plan
def test_the_first_forward_is_in_a_closure(plan, tmp_path):
    def run(place):
        model = place(net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        losses = []
        for step in range(4):

            def closure(step=step):
                optimizer.zero_grad()
                loss = model(inputs_of(step)).square().mean()
                loss.backward()
                return loss

            losses.append(optimizer.step(closure).item())
        return losses, model

    (losses, model), (expected, plain) = run(place_of(plan, tmp_path)), run(place_of(None, tmp_path))
    assert losses == expected
    assert_same_tensors(model.state_dict(), plain.state_dict())
    assert streamed(model).engine.store.ledger.num_commits == 4  # the first step also reached the store


@every_plan
def test_each_of_two_models_is_frozen_while_the_other_is_trained(plan, tmp_path):
    def run(place):
        generator, judge = place(net(4, 8)), place(net(8, 1))
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (generator, judge)]
        losses = []
        for step in range(6):
            turn = step % 2
            for model, active in ((generator, turn == 0), (judge, turn == 1)):
                model.requires_grad_(active)
            loss = judge(generator(inputs_of(step, 4))).mean() * (1 - 2 * turn)
            optimizers[turn].zero_grad()
            loss.backward()
            optimizers[turn].step()
            losses.append(loss.item())
        return losses, generator, judge, [optimizer.state_dict()["state"] for optimizer in optimizers]

    ours, plain = run(place_of(plan, tmp_path)), run(place_of(None, tmp_path))
    assert ours[0] == plain[0]
    for index in (1, 2):
        assert_same_tensors(ours[index].state_dict(), plain[index].state_dict())
    for state, expected in zip(ours[3], plain[3], strict=True):
        assert state.keys() == expected.keys()
        for number in expected:
            assert_same_tensors(state[number], expected[number])
    engine = streamed(ours[2]).engine
    assert engine.plan.trace.stages[0].params[0].requires_grad


def test_freezing_does_not_make_a_new_plan(tmp_path):
    model = headwater.compile(net(), backend("slabs", tmp_path))
    model(inputs_of(0)).sum().backward()
    engine = streamed(model).engine
    model.requires_grad_(False)
    model(inputs_of(1))
    model.requires_grad_(True)
    model(inputs_of(2)).sum().backward()
    assert streamed(model).engine is engine


@every_plan
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_first_forward_is_an_evaluation(mode, plan, tmp_path):
    def run(place):
        model = place(net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        losses = []
        for step in range(4):
            with mode():
                losses.append(model(inputs_of(step)).sum().item())
            optimizer.zero_grad()
            model(inputs_of(step)).square().mean().backward()
            optimizer.step()
        return losses, model.state_dict()

    ours, plain = run(place_of(plan, tmp_path)), run(place_of(None, tmp_path))
    assert ours[0] == plain[0]
    assert_same_tensors(ours[1], plain[1])


def test_wrapper_of_an_optimizer_is_not_an_optimizer(tmp_path):
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

        @property
        def param_groups(self):
            return self.optimizer.param_groups

    model = headwater.compile(net(), backend("slabs", tmp_path))
    wrapper = Wrapper(torch.optim.SGD(model.parameters(), lr=0.5))
    model(inputs_of(0)).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradient = model[0].weight.grad.clone()
    wrapper.optimizer.step()
    assert torch.equal(model.state_dict()["0.weight"], before["0.weight"] - 0.5 * gradient)


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        ("transformers", "accelerate.utils"),
        ("transformers", "transformers"),
        ("lightning", "lightning.fabric.plugins"),
    ],
)
def test_error_names_the_missing_extra(module, missing, monkeypatch):
    monkeypatch.delitem(sys.modules, f"headwater.integrations.{module}", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"headwater\[trainers\]"):
        importlib.import_module(f"headwater.integrations.{module}")
