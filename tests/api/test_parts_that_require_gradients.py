"""Views of a weight that require a gradient equal plain PyTorch, in values, flags and gradients."""

import pytest
import torch
from any_loop import check, some_plan
from torch import nn


def trained(place):
    torch.manual_seed(0)
    model = place.compile(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    x = torch.randn(4, 6)
    model(x).square().mean().backward()
    return model, x


@some_plan
@pytest.mark.parametrize(
    "take",
    [
        lambda weight: weight.data.t(),
        lambda weight: weight.data[:2],
        lambda weight: weight.detach().t(),
        lambda weight: weight.detach()[1:, 1:],
        lambda weight: weight.data,
        lambda weight: weight.detach(),
    ],
    ids=["data transposed", "data part", "transposed", "part", "data", "detached"],
)
def test_a_view_that_requires_a_gradient_has_separate_values_and_gradient(take, plan, tmp_path):
    def script(place):
        model, _ = trained(place)
        part = take(model[0].weight).requires_grad_()
        loss = (part @ torch.randn(part.shape[1], 3)).square().sum()
        loss.backward()
        return loss, part.grad, model[0].weight.grad

    check(script, plan, tmp_path)


@some_plan
@pytest.mark.parametrize(
    "view",
    [torch.t, lambda weight: weight[:2], lambda weight: weight.view(-1), lambda weight: weight.detach().t()],
    ids=["t", "part", "view", "detached"],
)
def test_a_view_made_without_gradients_requires_one_where_plain_pytorch_says_so(view, plan, tmp_path):
    def script(place):
        model, _ = trained(place)
        with torch.no_grad():
            part = view(model[0].weight)
        with torch.inference_mode():
            in_inference = view(model[0].weight)
        return part.requires_grad, in_inference.requires_grad, part.clone()

    check(script, plan, tmp_path)


@some_plan
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_products_outside_of_the_forward_take_the_kernel_of_plain_pytorch(mode, plan, tmp_path):
    """A product of a strided batch and a matrix takes another kernel if the matrix requires a gradient."""

    def script(place):
        model, _ = trained(place)
        batch = torch.randn(4, 6, 3).transpose(1, 2)
        with mode():
            return [batch @ weight for weight in (model[0].weight, model[0].weight.t(), model[0].weight.data)]

    check(script, plan, tmp_path)


@some_plan
def test_a_weight_saved_for_a_backward_of_the_user_takes_the_kernel_of_plain_pytorch(plan, tmp_path):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, got):
            x, weight = ctx.saved_tensors
            return got @ weight.t(), x.flatten(0, 1).t() @ got.flatten(0, 1)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.weight = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            return Product.apply(self.first(x), self.weight).transpose(1, 2).square().mean(2)

    def script(place):
        torch.manual_seed(0)
        model = place.compile(Net())
        for _ in range(2):
            (model(torch.randn(4, 3, 6)) * torch.randn(4, 6)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    check(script, plan, tmp_path)


@some_plan
def test_a_view_made_without_gradients_still_writes_to_the_weight(plan, tmp_path):
    def script(place):
        model, x = trained(place)
        weight = model[0].weight
        with torch.no_grad():
            weight.t().mul_(0.5)
            weight[:2].add_(weight.t()[:2])
            part = weight[1]
            part.fill_(0.25)
        return weight, model(x)

    check(script, plan, tmp_path)
