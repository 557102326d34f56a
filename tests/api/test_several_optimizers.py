"""Several optimizers for the same parameters, and tensors that a script keeps."""

import pytest
import torch
from any_loop import adamw, check, some_plan
from test_changed_models import inputs, stack, train


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
