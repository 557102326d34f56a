"""Attributes that the user's code sets on parameters, and reads or changes in forwards."""

import torch
from any_loop import check, extreme_plans, randn, train
from torch import nn


class Scaled(nn.Linear):
    """A layer that keeps its width, its scale and a count of calls at its weight, as mup does."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.weight.width_mult = 2.0
        self.weight.scale = torch.full((8,), 0.5)
        self.weight.calls = 0
        self.weight.means = [torch.zeros(8)]

    def forward(self, x):
        self.weight.calls += 1
        self.weight.means[0] += x.detach().mean(0)
        return torch.tanh(
            super().forward(x / self.weight.width_mult) * self.weight.scale + self.weight.means[0]
        )


@extreme_plans
def test_attributes_that_forwards_read_and_change_equal_plain(plan, tmp_path):
    def script(place):
        model = place.compile(nn.Sequential(*[Scaled() for _ in range(3)]))
        trained = train(model, lambda step: model(randn(4, 8, seed=step)).square().mean())
        weights = [layer.weight for layer in model]
        return trained, [(weight.calls, weight.scale, weight.means) for weight in weights]

    check(script, plan, tmp_path)


class Lazy(nn.Linear):
    """A layer that sets an attribute of its weight in its first forward."""

    def forward(self, x):
        if not hasattr(self.weight, "first"):
            self.weight.first = self.weight.detach().clone()
        return torch.tanh(super().forward(x)) + x @ self.weight.first


@extreme_plans
def test_an_attribute_that_the_first_forward_sets_equals_plain(plan, tmp_path):
    def script(place):
        model = place.compile(nn.Sequential(*[Lazy(8, 8) for _ in range(3)]))
        trained = train(model, lambda step: model(randn(4, 8, seed=step)).square().mean())
        return trained, [layer.weight.first for layer in model]

    check(script, plan, tmp_path)
