"""Custom `autograd.Function`s that keep weights as attributes of their contexts, instead of saving them."""

import pytest
import torch
from any_loop import PLANS, check, randn, train
from torch import nn
from torch.utils.checkpoint import checkpoint

plans_with_slabs = pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "memory"])


class Product(torch.autograd.Function):
    """`x @ weight.T`, whose context has views of the weight in a tuple, and in a list of a dictionary."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weights = (None, weight.view(-1))
        ctx.more = {"rows": [weight[0], "first"]}
        ctx.shape = weight.shape
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        scale = ctx.more["rows"][0].sum() - ctx.weights[1][: ctx.shape[1]].sum() + 1
        return scale * (gradient @ ctx.weights[1].view(ctx.shape)), None


class Layer(nn.Module):
    """A frozen weight that `Product` multiplies with, and a trained layer."""

    def __init__(self, width=6):
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(width, width), requires_grad=False)
        self.trained = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(Product.apply(x, self.frozen) + self.trained(x))


def layers(count=5):
    return nn.Sequential(*(Layer() for _ in range(count)))


@plans_with_slabs
def test_views_in_contexts_hold_no_slab_until_backward(plan, tmp_path):
    def script(place):
        model = place.compile(layers())
        return train(model, lambda step: model(randn(4, 6, seed=step)).square().mean())

    check(script, plan, tmp_path)


@plans_with_slabs
def test_a_graph_with_views_in_contexts_has_two_backwards(plan, tmp_path):
    def script(place):
        model = place.compile(layers())
        x = randn(4, 6, seed=1).requires_grad_()
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return x.grad, [param.grad for param in model.parameters()]

    check(script, plan, tmp_path)


class Checkpointed(nn.Module):
    """Six layers, in two checkpoints of the user."""

    def __init__(self, reentrant):
        super().__init__()
        self.layers = layers(6)
        self.reentrant = reentrant

    def forward(self, x):
        for start in (0, 3):
            x = checkpoint(self._run, x, start, use_reentrant=self.reentrant)
        return x

    def _run(self, x, start):
        for index in range(start, start + 3):
            x = self.layers[index](x)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_views_in_contexts_in_a_checkpoint_of_the_user_over_several_layers(reentrant, tmp_path):
    def script(place):
        model = place.compile(Checkpointed(reentrant))
        return train(model, lambda step: model(randn(4, 6, seed=step).requires_grad_()).square().mean())

    check(script, "slabs", tmp_path)


def test_a_second_derivative_of_views_in_contexts(tmp_path):
    def script(place):
        model = place.compile(layers())

        def penalty(step):
            x = randn(4, 6, seed=step).requires_grad_()
            (gradient,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
            return gradient.square().sum()

        return train(model, penalty)

    check(script, "slabs", tmp_path)
