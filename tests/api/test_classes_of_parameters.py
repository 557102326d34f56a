"""Parameters whose classes the user has written."""

import pytest
import torch
from any_loop import adamw, check, odd_plans, randn
from torch import nn

import headwater as hw
from headwater.core.errors import StreamError


class Scaled(nn.Parameter):
    """A parameter with a rate and a norm."""

    rate = 0.5

    def norm1(self):
        return self.abs().sum() * self.rate

    @property
    def rows(self):
        return self.shape[0]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = Scaled(torch.randn(6, 6) * 0.3)
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias)) / self.weight.rows


@odd_plans
def test_a_subclass_of_parameters_keeps_its_class_and_its_methods(plan, tmp_path):
    def script(place):
        model = place.compile(nn.Sequential(*(Layer() for _ in range(3)), nn.Linear(6, 2)))
        optimizer = adamw(model.parameters())
        found = []
        for number in range(3):
            loss = model(randn(4, 6, seed=number)).square().mean() + 0.01 * model[0].weight.norm1()
            loss.backward()
            for param in model.parameters():
                if isinstance(param, Scaled):
                    param.grad.mul_(param.rate)
                    found.append((param.rows, param.norm1().item()))
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found, model

    check(script, plan, tmp_path)


def test_a_released_parameter_has_its_class_again():
    model = hw.compile(Layer(), hw.backend("CSX"))
    model(torch.ones(2, 6))
    hw.release(model)
    assert type(model.weight) is Scaled


class Doubles(torch.Tensor):
    """A tensor whose sums are doubled."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        return result * 2 if func is torch.Tensor.sum else result


class Quantized(torch.Tensor):
    """A tensor of 8 bits that looks like one of 32 bits."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values):
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values)
        plain = [each.values.float() if isinstance(each, cls) else each for each in args]
        return func(*plain, **(kwargs or {}))


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(6, 6).as_subclass(Doubles), lambda: Quantized(torch.ones(6, 6).char())]
)
def test_classes_that_intercept_operations_are_refused(make):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    model[0].weight = nn.Parameter(make(), requires_grad=False)
    with pytest.raises(StreamError, match=r"parameter 0\.weight has the class .*, which intercepts"):
        hw.compile(model, hw.backend("CSX"))
