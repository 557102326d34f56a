"""Forwards that use gradients of their parameters, and backwards and steps inside forwards."""

import pytest
import torch
from any_loop import Place, check, extreme_plans, randn, some_plan, train
from torch import nn

from headwater.core.errors import StreamError


class Layer(nn.Module):
    """A layer that calls a function with itself in its forward.

    Args:
        use: the function.
    """

    def __init__(self, use) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.use = use

    def forward(self, x):
        self.use(self)
        return torch.tanh(self.inner(x))


def read(layer):
    return layer.inner.weight.grad


def drop(layer):
    layer.inner.weight.grad = None


@extreme_plans
@pytest.mark.parametrize("use", [read, drop, nn.Module.zero_grad])
def test_a_forward_that_uses_gradients_of_its_parameters_is_refused(use, plan, tmp_path):
    """A bound parameter has no gradient, so the forward would see `None` while plain PyTorch accumulates."""
    place = Place(plan, tmp_path)
    model = place.compile(nn.Sequential(*[Layer(use) for _ in range(3)]))
    with pytest.raises(StreamError, match=r"reads or sets \S+\.grad"):
        model(randn(4, 8, seed=0))
    place.release()


@extreme_plans
def test_a_forward_that_converts_its_layers_to_their_own_dtype_equals_plain(plan, tmp_path):
    """`module.to` looks at the gradients, too."""

    def script(place):
        model = place.compile(nn.Sequential(*[Layer(lambda layer: layer.inner.to("cpu")) for _ in range(3)]))
        return train(model, lambda step: model(randn(4, 8, seed=step)).square().mean())

    check(script, plan, tmp_path)


class LearnsLocally(nn.Linear):
    """A layer whose forward also trains it."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.optimizer = torch.optim.SGD(self.parameters(), 0.1)

    def forward(self, x):
        output = super().forward(x.detach())
        output.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return output.detach()


@some_plan
def test_backwards_and_steps_inside_forwards_equal_plain(plan, tmp_path):
    def script(place):
        model = place.compile(nn.Sequential(*[LearnsLocally() for _ in range(3)]))
        return [model(randn(4, 8, seed=step)) for step in range(3)], model

    check(script, plan, tmp_path)


@extreme_plans
def test_a_step_while_weights_are_bound_is_refused(plan, tmp_path):
    """The step would find no gradients, and train nothing."""

    class Steps(nn.Linear):
        def forward(self, x):
            optimizer.step()
            return super().forward(x)

    place = Place(plan, tmp_path)
    model = place.compile(nn.Sequential(*[Steps(8, 8) for _ in range(3)]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(StreamError, match="steps inside the forward"):
        model(randn(4, 8, seed=0))
    place.release()


def test_a_recomputed_forward_in_which_an_optimizer_first_steps_is_refused(tmp_path):
    """The first step of an optimizer may make a new engine, while this forward runs."""

    class Quantizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Linear(8, 8)
            self.optimizer = torch.optim.SGD(self.codes.parameters(), 0.1)

        def forward(self, x):
            self.codes(x.detach()).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return x + self.codes(x)

    place = Place("recompute", tmp_path)
    model = place.compile(nn.Sequential(*[Quantizer() for _ in range(3)]))
    with pytest.raises(StreamError, match="weights were changed between this forward and its backward"):
        model(randn(4, 8, seed=0)).square().mean().backward()
    place.release()


@extreme_plans
def test_a_model_that_returns_only_detached_outputs_equals_plain(plan, tmp_path):
    """Its layers are trained by their own losses, between forwards."""

    class Detached(nn.Linear):
        def forward(self, x):
            self.output = torch.tanh(super().forward(x.detach()))
            return self.output.detach()

    def script(place):
        model = place.compile(nn.Sequential(*[Detached(8, 8) for _ in range(3)]))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        outputs = []
        for step in range(3):
            outputs.append(model(randn(4, 8, seed=step)))
            optimizer.zero_grad()
            for layer in model:
                layer.output.square().mean().backward()
            optimizer.step()
        return outputs, model, optimizer

    check(script, plan, tmp_path)
