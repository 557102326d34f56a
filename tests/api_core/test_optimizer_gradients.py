"""The gradients of an optimizer are unscaled in place, and searched for numbers that are not finite."""

import pytest
import torch

from headwater.api.gradients import are_finite, gradients_of, unscale


def optimizer_over(*gradients):
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    return torch.optim.SGD([{"params": params[:1]}, {"params": params[1:]}], lr=0.1)


def test_parameters_without_a_gradient_are_left_out():
    first, last = torch.ones(2), torch.full((2,), 3.0)
    found = gradients_of(optimizer_over(first, None, last))
    assert [gradient.tolist() for gradient in found] == [[1, 1], [3, 3]]


def test_unscaling_divides_in_place():
    gradients = [torch.tensor([8.0, -4.0]), torch.tensor([0.0, 2.0])]
    unscale(gradients, 4.0)
    assert [gradient.tolist() for gradient in gradients] == [[2.0, -1.0], [0.0, 0.5]]


def test_a_scale_of_1_leaves_gradients_alone():
    gradient = torch.ones(2)
    version = gradient._version
    unscale([gradient], 1.0)
    assert gradient._version == version


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_element_that_is_not_finite_is_found(bad):
    assert are_finite([torch.ones(3), torch.zeros(0)])
    assert not are_finite([torch.ones(3), torch.tensor([0.0, bad])])
