"""Initial distributions compared with `torch.distributions` and their definitions."""

import math

import pytest
import torch
from torch import nn

from headwater.config.models.common import InitializerConfig
from headwater.config.models.encoder import QuestionAnsweringConfig
from headwater.models.layers.initializers import draw
from headwater.models.registry import build_model


def quantile_error(sample, reference):
    """Return the maximum distance between the distribution functions of two samples."""
    points = torch.linspace(0.01, 0.99, 99)
    return (
        (torch.searchsorted(reference.sort().values, sample.quantile(points)) / reference.numel() - points)
        .abs()
        .max()
    )


@pytest.mark.parametrize(
    ("mean", "std", "a", "b"),
    [(0, 0.02, -0.04, 0.04), (1, 0.5, 0.9, 3.0), (0, 1, None, None), (0, 1, 1.5, 2)],
)
def test_truncated_normal_has_the_distribution_of_torch(mean, std, a, b):
    config = InitializerConfig(name="truncated_normal", mean=mean, std=std, a=a, b=b)
    sample = draw("w", (300, 300), config, 0).flatten()
    reference = nn.init.trunc_normal_(
        torch.empty(90_000), mean, std, *config.bounds, generator=torch.Generator().manual_seed(1)
    )
    assert config.bounds[0] <= sample.min()
    assert sample.max() <= config.bounds[1]
    assert quantile_error(sample, reference) < 0.01


@pytest.mark.parametrize(
    ("settings", "low", "high", "std"),
    [
        ({"name": "normal", "mean": 0.5, "std": 0.1}, -1, 2, 0.1),
        ({"name": "uniform", "a": -1.0, "b": 3.0}, -1, 3, 4 / math.sqrt(12)),
        ({"name": "xavier_normal", "gain": 2.0}, -2, 2, 2 * math.sqrt(2 / 500)),
        ({"name": "xavier_uniform"}, -math.sqrt(6 / 500), math.sqrt(6 / 500), math.sqrt(2 / 500)),
        ({"name": "constant", "value": 0.25}, 0.25, 0.25, 0),
        ({"name": "zeros"}, 0, 0, 0),
        ({"name": "ones"}, 1, 1, 0),
        ({"name": "truncated_normal", "std": 0.0}, 0, 0, 0),
    ],
)
def test_spread_and_bounds(settings, low, high, std):
    sample = draw("w", (200, 300), InitializerConfig(**settings), 0)
    assert low <= sample.min()
    assert sample.max() <= high
    assert sample.std().item() == pytest.approx(std, rel=0.02)


def test_values_depend_only_on_name_and_seed():
    config = InitializerConfig(name="normal", std=1.0)
    first = draw("a", (4, 4), config, 0)
    torch.rand(10)
    assert torch.equal(first, draw("a", (4, 4), config, 0))
    assert not torch.equal(first, draw("b", (4, 4), config, 0))
    assert not torch.equal(first, draw("a", (4, 4), config, 1))
    with torch.device("meta"):
        assert torch.equal(first, draw("a", (4, 4), config, 0))


@pytest.mark.parametrize("symmetric", [False, True])
def test_queries_may_start_equal_to_keys(symmetric):
    """If they are equal, a token attends most to equal tokens."""
    config = QuestionAnsweringConfig(
        name="bert/qa", vocab_size=64, hidden_size=32, num_heads=2, num_hidden_layers=2, filter_size=32,
        initializer_range=0.2, symmetric_attention_init=symmetric,
    )  # fmt: skip
    model = build_model(config)
    tokens = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
    for block in model.encoder.blocks:
        query, key, value = block.attention.qkv.weight.detach().split(32)
        assert not torch.equal(key, value)
        scores = (tokens @ query.T) @ (tokens @ key.T).T
        of_itself = (scores.argmax(1) == torch.arange(20)).float().mean()
        assert of_itself > 0.8 if symmetric else of_itself < 0.4
        assert torch.equal(query, key) == symmetric


@pytest.mark.parametrize("distribution", ["truncated_normal", "normal", "uniform"])
@pytest.mark.parametrize(("mode", "fan"), [("fan_in", 400), ("fan_out", 100), ("fan_avg", 250)])
def test_variance_scaling(distribution, mode, fan):
    initializer = InitializerConfig(name="variance_scaling", scale=0.5, mode=mode, distribution=distribution)
    value = draw("a", (100, 400), initializer, 0)
    assert value.var().item() == pytest.approx(0.5 / fan, rel=0.05)
    assert draw("a", (100, 400), initializer.scaled(3.0), 0).std() == pytest.approx(
        3 * value.std().item(), rel=1e-4
    )
