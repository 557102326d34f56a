"""Several optimizers for the same parameters, and tensors that a script keeps."""

import pytest
import torch
from any_loop import adamw, check, randn, some_plan
from test_changed_models import inputs, stack, train
from torch import nn


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True)


@some_plan
@pytest.mark.parametrize("second", [sgd, adamw])
def test_alternating_optimizers_keep_their_moments(plan, second, tmp_path):
    def script(place):
        model = place.compile(stack())
        optimizers = [adamw(model.parameters()), second(model.parameters())]
        losses = [train(model, optimizers[number % 2], 1 + number // 2, start=number) for number in range(5)]
        return losses, model, optimizers

    check(script, plan, tmp_path)


@some_plan
def test_a_kept_state_dict_shows_its_optimizer(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        first = adamw(model.parameters())
        train(model, first, 2)
        kept = first.state_dict()
        second = sgd(model.parameters())
        train(model, second, 2)
        then = torch.stack([kept["state"][number]["exp_avg"].sum() for number in range(8)])
        train(model, first, 1)
        return then, kept["state"][0]["exp_avg"], second

    check(script, plan, tmp_path)


@some_plan
def test_kept_tensors_follow_the_weights_when_the_model_is_planned_again(plan, tmp_path):
    def script(place):
        model = place.compile(stack())
        with torch.no_grad():
            model(inputs(0))
        weight = model[2][0].weight
        kept = [weight.detach(), weight.data[1:], model.state_dict()["2.0.weight"]]
        losses = train(model, adamw(model.parameters()), 2)
        model(inputs(0).repeat(5, 1))
        del model[0]
        return losses, train(model, sgd(model.parameters()), 1), [each.clone() for each in kept]

    check(script, plan, tmp_path)


class Scale(nn.Module):
    """A layer whose backward needs the parameter itself, and not a view such as `weight.t()`."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (2 * x)


@some_plan
def test_an_optimizer_made_during_the_backward(plan, tmp_path):
    """A store for its state replaces the old store while the backward still needs weights."""

    def script(place):
        model = place.compile(
            nn.Sequential(
                nn.Linear(4, 6), Scale(6), nn.Sequential(Scale(6), nn.Linear(6, 6)), nn.Linear(6, 3)
            )
        )
        optimizers, seen = {}, []

        def step(param):
            optimizer = optimizers.get(param) or optimizers.setdefault(param, sgd([param]))
            seen.append(param.grad.clone())
            optimizer.step()
            optimizer.zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        for number in range(2):
            loss = model(randn(5, 4, seed=number)).square().mean()
            loss.backward()
            seen.append(loss)
        return seen, model

    check(script, plan, tmp_path)
