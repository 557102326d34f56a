"""Models inside transforms of `torch.func` and in forward-mode differentiation."""

import pytest
import torch
from any_loop import Place, check, randn
from torch import nn

import headwater as cstorch
from headwater.core.errors import StreamError

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def stack():
    return nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)))


def jvp(model, x):
    return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]


def jacobian(model, x):
    return torch.func.jacrev(model)(x)


def dual_numbers(model, x):
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def derivatives(model, transform):
    """Return a derivative of the model after an ordinary call, and the gradients of its square."""
    x = randn(4, 3, seed=1)
    model(x)
    derivative = transform(model, x)
    derivative.square().sum().backward()
    return derivative, [param.grad for param in model.parameters()]


@pytest.mark.parametrize("transform", [jvp, jacobian, dual_numbers])
def test_torch_func_derivatives_of_a_model_in_memory_equal_plain(transform, tmp_path):
    check(lambda place: derivatives(place.compile(stack()), transform), "memory", tmp_path)


@pytest.mark.parametrize("plan", ["slabs"])
def test_forward_mode_derivatives_of_a_streamed_model_equal_plain(plan, tmp_path):
    check(lambda place: derivatives(place.compile(stack()), dual_numbers), plan, tmp_path)


def test_a_model_that_recomputes_keeps_its_activations_in_a_transform(tmp_path):
    def script(place):
        model = stack()
        if place.plan is not None:
            cstorch.compile(model, cstorch.backend("CSX", tier="memory", activations="recompute"))
        try:
            return derivatives(model, jacobian)
        finally:
            cstorch.release(model)

    check(script, "memory", tmp_path)


@pytest.mark.parametrize("plan", ["slabs", "recompute on disk"])
@pytest.mark.parametrize("transform", [jvp, jacobian])
def test_torch_func_transforms_of_a_streamed_model_are_refused(plan, transform, tmp_path):
    place = Place(plan, tmp_path)
    model = place.compile(stack())
    x = randn(4, 3, seed=1)
    expected = model(x).detach()
    with pytest.raises(StreamError, match="need every weight in memory"):
        transform(model, x)
    assert torch.equal(model(x), expected)
    place.release()


@pytest.mark.parametrize("transform", [jvp, jacobian, lambda model, x: torch.func.vmap(model)(x)])
def test_the_first_call_is_refused_in_a_transform(transform, tmp_path):
    place = Place("memory", tmp_path)
    model = place.compile(stack())
    with pytest.raises(StreamError, match=r"the first call of the model is inside of torch.func"):
        transform(model, randn(4, 3, seed=1))
    place.release()


TRANSFORMS_OF_WEIGHTS = {
    "vmap": lambda weight: torch.func.vmap(lambda row: row.square().sum())(weight),
    "vmap of a part": lambda weight: torch.func.vmap(lambda row: row.square().sum())(weight.data[1:]),
    "grad": lambda weight: torch.func.grad(lambda whole: whole.pow(3).sum())(weight),
    "vjp": lambda weight: torch.func.vjp(lambda whole: whole.square().sum(1), weight)[1](torch.ones(3))[0],
    "vmap of grad": lambda weight: torch.func.vmap(torch.func.grad(lambda row: row.pow(3).sum()))(weight),
}


@pytest.mark.parametrize("kind", TRANSFORMS_OF_WEIGHTS)
def test_transforms_get_the_present_values_of_a_weight_that_is_their_argument(kind, tmp_path):
    def script(place):
        model = place.compile(stack())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weight, found = model[0][0].weight, []
        for number in range(3):
            model(randn(4, 3, seed=number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(TRANSFORMS_OF_WEIGHTS[kind](weight))
            if found[-1].requires_grad:
                found[-1].square().sum().backward()
            found.append(weight.grad)
            found[:] = [each if each is None else each.detach().clone() for each in found]
        return found, model

    check(script, "slabs", tmp_path)


@pytest.mark.parametrize("transform", [torch.func.grad, lambda function: torch.func.vmap(function)])
def test_a_weight_is_read_before_a_transform_or_refused(transform, tmp_path):
    """Its gradient from the loop's backward is that of plain PyTorch."""

    def script(place):
        model = place.compile(stack())
        model(randn(4, 3, seed=1))
        weight = next(model.parameters())
        if place.plan is not None:
            with pytest.raises(StreamError, match=r"read inside of torch\.func") as caught:
                transform(lambda x: (weight * x).square().sum())(torch.ones(3))
            assert "weight = layer.weight.clone()" in caught.value.remedy
        copy = weight.clone()
        transform(lambda x: (copy * x).square().sum())(torch.ones(3)).sum().backward()
        return weight.grad.clone()

    check(script, "memory", tmp_path)
