"""Parameters that are not row-major have the values and strides of plain PyTorch everywhere."""

import copy

import pytest
import torch
from any_loop import adamw, check, extreme_plans
from test_changed_models import inputs, stack, train
from torch import nn

import headwater as cstorch


def transposed(model):
    for layer in list(model)[:3]:
        layer[0].weight = nn.Parameter(torch.randn(6, 6).t())


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(n, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for n in (3, 8, 8))
        ).to(memory_format=torch.channels_last)
        self.head = nn.Linear(8, 6)

    def forward(self, x):
        x = x.repeat(2, 3).view(6, 3, 1, 6).repeat(1, 1, 5, 1).to(memory_format=torch.channels_last)
        return self.head(self.layers(x).mean((2, 3)))


class Reshaped(nn.Module):
    """A convolution in channels_last whose input and gradient are row-major."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.pictures = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        x = torch.tanh(self.before(x.repeat(3, 1)))
        x = x + self.pictures(x.reshape(-1, 2, 3, 3)).reshape(x.shape)
        return self.head(x)


def matrices():
    model = stack()
    transposed(model)
    return model


def rmsprop(params):
    return torch.optim.RMSprop(params, lr=0.01, foreach=False)


def adafactor(params):
    return torch.optim.Adafactor(params, lr=0.01, foreach=False)


@extreme_plans
@pytest.mark.parametrize("make", [matrices, Pictures, Reshaped])
@pytest.mark.parametrize("optimize", [adamw, rmsprop, adafactor])
def test_strides_and_values_equal_plain(plan, make, optimize, tmp_path):
    def script(place):
        model = place.compile(make())
        optimizer = optimize(model.parameters())
        losses, shown = [], []
        for number in range(3):
            for part in range(2):
                loss = model(inputs(2 * number + part)).square().mean()
                loss.backward()
            losses += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()]
            params = list(model.parameters())
            shown += [p.stride() for p in params] + [p.grad.stride() for p in params]
            optimizer.step()
            optimizer.zero_grad(set_to_none=number > 0)
        shown += [(p.is_contiguous(), p.t().stride(), (2 * p).stride()) for p in params if p.dim() == 2]
        return losses, shown, model, optimizer.state_dict()["state"]

    check(script, plan, tmp_path)


@extreme_plans
@pytest.mark.parametrize("take", [lambda state: state, copy.deepcopy], ids=["state_dict", "deepcopy"])
def test_a_fused_optimizer_of_a_plain_model_continues_from_the_state_of_a_streamed_one(plan, take, tmp_path):
    """torch's fused CPU kernels read memory in order, so the state needs the strides of the parameters."""

    def script(place):
        model, plain = place.compile(matrices()), matrices()
        optimizer, other = adamw(model.parameters()), adamw(plain.parameters())
        train(model, optimizer, 2)
        plain.load_state_dict(model.state_dict())
        other.load_state_dict(take(optimizer.state_dict()))
        strides = [state["exp_avg"].stride() for state in other.state.values()]
        return train(plain, other, 2), strides, plain

    check(script, plan, tmp_path)


@pytest.mark.parametrize("plan", ["slabs", "recompute on disk"])
def test_depthwise_convolution_in_channels_last(plan, tmp_path):
    """The stride of the channel dimension, which has size 1, decides the kernel."""

    def script(place):
        convolution = nn.Conv2d(2, 2, 3, padding=1, groups=2).to(memory_format=torch.channels_last)
        first = nn.Sequential(nn.Flatten(), nn.Linear(18, 18), nn.Unflatten(1, (2, 3, 3)))
        model = place.compile(nn.Sequential(first, convolution))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        losses = []
        for number in range(3):
            optimizer.zero_grad()
            output = model(torch.randn(12, 2, 3, 3, generator=torch.Generator().manual_seed(number)))
            output.square().mean().backward()
            optimizer.step()
            losses.append(output)
        return losses, convolution.weight.stride(), model

    check(script, plan, tmp_path)


def transposed_during_training(compile_, optimize):
    """Train, transpose a weight after the second step, and return losses, strides and weights."""
    torch.manual_seed(0)
    model = compile_(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)))
    optimizer, seen = optimize(model.parameters()), []
    for number in range(4):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16, generator=torch.Generator().manual_seed(number))).square().mean()
        loss.backward()
        optimizer.step()
        if number == 1:
            model[0].weight.data = model[0].weight.data.t()
        seen += [loss.item(), model[0].weight.stride()]
    return seen, model


@pytest.mark.parametrize("optimize", [rmsprop, adafactor, lambda params: torch.optim.AdamW(params, lr=0.01)])
def test_a_weight_may_be_transposed_during_training(optimize, tmp_path):
    check(lambda place: transposed_during_training(place.compile, optimize), "memory", tmp_path)


def test_fused_kernels_keep_the_state_of_a_transposed_weight_in_its_order():
    """torch's fused CPU kernels read memory in order, so tensors with different strides would be mixed up."""

    def adam(fused):
        return lambda params: torch.optim.Adam(params, lr=0.01, fused=fused)

    def streamed(model):
        return cstorch.compile(model, cstorch.backend("CSX"))

    given, model = transposed_during_training(streamed, adam(True))
    expected, plain = transposed_during_training(lambda model: model, adam(False))
    assert given[1::2] == expected[1::2]
    torch.testing.assert_close(given[::2], expected[::2], rtol=1e-6, atol=0)
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-7)
