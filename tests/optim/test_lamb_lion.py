"""Lamb and Lion against plain transcriptions of their papers, in plain Python."""

import copy
import math

import pytest
import torch

from headwater.core.errors import ConfigError
from headwater.optim import AdamW, Lamb, Lion

SHAPES = ((6, 4), (5,), (2, 3, 2))
STEPS = 50


def values(seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def train(optimizer, params, steps=STEPS):
    for step in range(steps):
        for param, gradient in zip(params, values(100 + step), strict=True):
            param.grad = gradient.to(param.dtype)
        optimizer.step()
    return [param.detach() for param in params]


def lion_of_the_paper(theta, gradients, lr, beta1, beta2, decay):
    """Algorithm 2 of arXiv:2302.06675, one element."""
    m = 0.0
    for g in gradients:
        c = beta1 * m + (1 - beta1) * g
        theta = theta - lr * (math.copysign(1.0, c) * (c != 0) + decay * theta)
        m = beta2 * m + (1 - beta2) * g
    return theta


def lamb_of_the_paper(x, gradients, lr, beta1, beta2, eps, decay):
    """Algorithm 2 of arXiv:1904.00962 with phi(z) = z, one layer as a list of its elements."""
    m, v = [0.0] * len(x), [0.0] * len(x)
    for t, g in enumerate(gradients, start=1):
        m = [beta1 * a + (1 - beta1) * b for a, b in zip(m, g, strict=True)]
        v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g, strict=True)]
        r = [
            (a / (1 - beta1**t)) / (math.sqrt(b / (1 - beta2**t)) + eps) + decay * c
            for a, b, c in zip(m, v, x, strict=True)
        ]
        ratio = math.dist(x, [0.0] * len(x)) / math.dist(r, [0.0] * len(r))
        x = [a - lr * ratio * b for a, b in zip(x, r, strict=True)]
    return x


def flat_gradients(index):
    return [values(100 + step)[index].flatten().tolist() for step in range(STEPS)]


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_lion_equals_the_papers_formula(decay):
    params = [torch.nn.Parameter(value) for value in values(0)]
    ours = train(Lion(params, lr=0.01, betas=(0.9, 0.97), weight_decay=decay), params)
    for index, (start, end) in enumerate(zip(values(0), ours, strict=True)):
        per_element = zip(*flat_gradients(index), strict=True)
        expected = [
            lion_of_the_paper(theta, gradients, 0.01, 0.9, 0.97, decay)
            for theta, gradients in zip(start.flatten().tolist(), per_element, strict=True)
        ]
        assert end.flatten().tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_lamb_equals_the_papers_formula(decay):
    params = [torch.nn.Parameter(value) for value in values(0)]
    ours = train(Lamb(params, lr=0.02, betas=(0.8, 0.99), eps=1e-5, weight_decay=decay), params)
    for index, (start, end) in enumerate(zip(values(0), ours, strict=True)):
        expected = lamb_of_the_paper(
            start.flatten().tolist(), flat_gradients(index), 0.02, 0.8, 0.99, 1e-5, decay
        )
        assert end.flatten().tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_lamb_without_scaling_is_adamw():
    ours = [torch.nn.Parameter(value) for value in values(0)]
    theirs = [torch.nn.Parameter(value) for value in values(0)]
    options = {"lr": 0.01, "eps": 1e-6, "weight_decay": 0.1}
    train(Lamb(ours, adam=True, **options), ours)
    train(AdamW(theirs, **options), theirs)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-8)


def test_lamb_moves_a_parameter_of_zeros():
    param = torch.nn.Parameter(torch.zeros(4))
    param.grad = torch.ones(4)
    Lamb([param], lr=0.1).step()
    torch.testing.assert_close(param.detach(), torch.full((4,), -0.1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", [Lamb, Lion])
def test_each_group_has_its_options(kind):
    grouped = [torch.nn.Parameter(value) for value in values(0)]
    groups = [{"params": grouped[:1], "lr": 0.5, "weight_decay": 0.2}, {"params": grouped[1:]}]
    train(kind(groups, lr=0.01), grouped, steps=5)
    first, others = ([torch.nn.Parameter(value) for value in values(0)] for _ in range(2))
    train(kind(first, lr=0.5, weight_decay=0.2), first, steps=5)
    train(kind(others, lr=0.01), others, steps=5)
    assert torch.equal(grouped[0], first[0])
    assert all(map(torch.equal, grouped[1:], others[1:]))


@pytest.mark.parametrize("kind", [Lamb, Lion])
def test_resuming_from_a_state_dict_is_bit_identical(kind):
    params = [torch.nn.Parameter(value) for value in values(0, torch.float32)]
    optimizer = kind(params, lr=0.01, weight_decay=0.1)
    train(optimizer, params, steps=3)
    copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
    resumed = kind(copies, lr=0.01, weight_decay=0.1)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(map(torch.equal, train(optimizer, params, 3), train(resumed, copies, 3)))


@pytest.mark.parametrize("kind", [Lamb, Lion])
def test_a_closure_is_called_with_gradients(kind):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([param], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert bool((param < 1).all())


@pytest.mark.parametrize("kind", [Lamb, Lion])
def test_a_parameter_without_a_gradient_does_not_change(kind):
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))]
    params[0].grad = torch.ones(3)
    optimizer = kind(params, lr=0.1, weight_decay=0.5)
    optimizer.step()
    assert torch.equal(params[1].detach(), torch.ones(3))
    assert params[1] not in optimizer.state


@pytest.mark.parametrize("kind", [Lamb, Lion])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr >= 0, got -1.0"),
        ({"lr": float("nan")}, "lr >= 0, got nan"),
        ({"weight_decay": -0.1}, "weight_decay >= 0, got -0.1"),
        ({"betas": (0.9, 1.0)}, "expected betas >= 0 and < 1"),
    ],
)
def test_arguments_out_of_range(kind, options, message):
    with pytest.raises(ConfigError, match=message):
        kind([torch.nn.Parameter(torch.ones(1))], **options)


def test_lamb_counts_its_steps_in_fp32_whatever_the_default_dtype_is():
    expected = values(0, torch.float32)
    found = [torch.nn.Parameter(value.clone()) for value in expected]
    expected = train(Lamb(expected, lr=0.01), expected, steps=300)
    torch.set_default_dtype(torch.bfloat16)
    try:
        optimizer = Lamb(found, lr=0.01)
        found = train(optimizer, found, steps=300)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {float(state["step"]) for state in optimizer.state.values()} == {300.0}
    assert all(map(torch.equal, found, expected))
