"""Transforms of torch.func in a streamed forward are refused; torch.autograd.grad equals plain PyTorch."""

import pytest
import torch
from any_loop import check, some_plan
from torch import nn

import headwater
from headwater.core.errors import StreamError


def by_transform(energy, x):
    return torch.func.grad(energy)(x)


def by_autograd(energy, x):
    return torch.autograd.grad(energy(x), x, create_graph=True)[0]


class Descends(nn.Module):
    """A model whose forward takes a gradient step on an energy."""

    def __init__(self, gradient):
        super().__init__()
        self.gradient = gradient
        self.first, self.energy = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return x - self.gradient(lambda v: self.energy(v).tanh().square().sum(), x)


def losses(gradient, options=None):
    torch.manual_seed(0)
    model = Descends(gradient)
    if options is not None:
        headwater.compile(model, headwater.backend("CSX", **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    found = []
    for step in range(2):
        loss = model(torch.ones(2, 4) * step).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("options", [{}, {"tier": "memory", "num_slabs": 2, "activations": "recompute"}])
def test_the_remedy_in_the_error_for_a_transform_works(options):
    with pytest.raises(StreamError, match=r"(?s)torch\.func.*where: Descends.*torch\.autograd\.grad"):
        losses(by_transform, options)
    more = {**options, "num_slabs": 4} if options else {}
    assert losses(by_autograd, more) == losses(by_autograd)


class Batched(nn.Module):
    """A model that applies a layer, which is a stage, with `torch.func.vmap`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.func.vmap(layer)(x).tanh()
        return x


def loss_and_gradients(place):
    torch.manual_seed(0)
    model = place.compile(Batched())
    loss = model(torch.randn(3, 2, 4)).square().mean()
    loss.backward()
    return loss, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("plan", ["memory", "disk", "recompute", "recompute on disk"])
def test_a_stage_within_vmap_equals_plain(plan, tmp_path):
    check(loss_and_gradients, plan, tmp_path)


@some_plan
def test_a_tensor_of_a_transform_that_has_ended_is_kept_by_the_user(plan, tmp_path):
    kept = []

    def script(place):
        torch.func.vmap(lambda row: kept.append(row) or row)(torch.randn(2, 3))
        torch.func.grad(lambda x: kept.append(x * 1) or x.sum())(torch.randn(3))
        return loss_and_gradients(place)

    check(script, plan, tmp_path)


@some_plan
def test_a_gradient_transform_of_a_model_that_reads_its_weights_itself(plan, tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.weight = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return self.first(x) @ self.weight.t() + x @ self.weight[:, :4]

    def script(place):
        torch.manual_seed(0)
        model = place.compile(Net())
        x = torch.randn(2, 4)
        model(x).sum().backward()
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(bias):
            return torch.func.functional_call(model, {**weights, "first.bias": bias}, (x,)).square().sum()

        return torch.func.grad(loss)(torch.ones(4))

    check(script, plan, tmp_path)
