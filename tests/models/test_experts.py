"""A mixture of experts compared with transformers' Mixtral and with explicit routing."""

import pytest
import torch

from headwater.models.layers.experts import MixtureOfExperts
from headwater.models.layers.feed_forward import FeedForward
from headwater.plan.trace import trace_step


def mixture(**changes):
    options = {"num_experts": 4, "top_k": 2, "bias": False, "dropout": 0.0}
    torch.manual_seed(0)
    module = MixtureOfExperts(8, 12, "swiglu", **{**options, **changes})
    for param in module.parameters():
        torch.nn.init.normal_(param, std=0.5)
    return module


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(2, 9, 8)


def test_mixture_equals_mixtral(x):
    transformers = pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = transformers.MixtralConfig(
        hidden_size=8, intermediate_size=12, num_local_experts=4, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    theirs, ours = MixtralSparseMoeBlock(config), mixture()
    gate, up = (part.weight.view(4, 12, 8) for part in (ours.gate, ours.input))
    theirs.load_state_dict(
        {
            "gate.weight": ours.router.weight,
            "experts.gate_up_proj": torch.cat((gate, up), dim=1),
            "experts.down_proj": ours.output.weight.view(4, 8, 12),
        }
    )
    expected = theirs(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(ours(x)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"top_k": 1}, {"top_k": 4}, {"top_k": 1, "null_expert_bias": 1.1}])
@pytest.mark.parametrize("nonlinearity", ["swiglu", "gelu"])
def test_every_token_goes_where_the_router_sends_it(changes, nonlinearity, x):
    torch.manual_seed(0)
    options = {"num_experts": 4, "top_k": 2, "num_shared_experts": 2, **changes}
    ours = MixtureOfExperts(8, 12, nonlinearity, bias=True, dropout=0.0, **options)
    for param in ours.parameters():
        torch.nn.init.normal_(param, std=0.5)
    output, _ = ours(x)
    experts = []
    for index in range(4):
        expert = FeedForward(8, 12, nonlinearity, bias=True, dropout=0.0)
        for name in ("input", "gate", "output"):
            stacked = getattr(ours, name)
            if stacked is not None:
                getattr(expert, name).weight = torch.nn.Parameter(stacked.weight.chunk(4)[index])
                getattr(expert, name).bias = torch.nn.Parameter(stacked.bias.chunk(4)[index])
        experts.append(expert)
    for token, given in zip(x.flatten(0, 1), output.flatten(0, 1), strict=True):
        logits = ours.router(token).tolist()
        null = [ours.null_expert_bias] if ours.null_expert_bias is not None else []
        probabilities = torch.tensor([*logits, *null]).softmax(0)[:4]
        best = probabilities.argsort(descending=True)[: ours.top_k]
        weights = probabilities[best] / (probabilities[best].sum() if ours.top_k > 1 else 1)
        expected = sum(weight * experts[index](token) for weight, index in zip(weights, best, strict=True))
        torch.testing.assert_close(given, expected + ours.shared(token), rtol=1e-4, atol=1e-5)


def test_load_balancing_loss_is_1_if_balanced_and_else_more():
    even = mixture(num_experts=2, top_k=1)
    with torch.no_grad():
        even.router.weight.copy_(torch.tensor([[1.0] + [0.0] * 7, [-1.0] + [0.0] * 7]))
    x = torch.zeros(1, 4, 8)
    x[0, :, 0] = torch.tensor([3.0, -3.0, 2.0, -2.0])
    assert even(x)[1].item() == pytest.approx(1.0, abs=1e-6)
    x[0, :, 0] = 3.0
    assert even(x)[1].item() == pytest.approx(2.0, rel=0.01), "all to one of two"


def test_the_router_learns(x):
    for changes in ({}, {"top_k": 1}, {"top_k": 1, "null_expert_bias": 1.1}):
        ours = mixture(**changes)
        output, _ = ours(x)
        output.square().sum().backward()
        assert ours.router.weight.grad.abs().max().item() > 1e-3


def test_unused_expert_has_gradient_zero(x):
    ours = mixture(top_k=1)
    with torch.no_grad():
        ours.router.weight.zero_()
        ours.router.weight[2] = 100 * torch.sign(x.flatten(0, 1).mean(0))
    output, _ = ours(x.abs() * torch.sign(x.flatten(0, 1).mean(0)))
    output.square().sum().backward()
    norms = [float(part.norm()) for part in ours.output.weight.grad.chunk(4)]
    assert norms[2] > 0 and norms[:2] + norms[3:] == [0.0] * 3


def test_a_dry_run_spreads_tokens_evenly():
    with torch.device("meta"):
        model = mixture(num_experts=8)
    trace = trace_step(model, torch.empty(2, 16, 8, device="meta"), loss_function=lambda m, x: m(x)[0].sum())
    products = 2 * 32 * 2 * 3 * 8 * 12 + 2 * 32 * 8 * 8  # two experts per token, and the router
    assert sum(cost.forward.flops for cost in trace.costs) == products
