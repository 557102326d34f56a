"""First masks and their changes, against torch's own pruning and the formulas of the papers."""

import math

import pytest
import torch
from torch.nn.utils import prune

from headwater.config.sparsity import SparsityConfig
from headwater.sparsity.masks import INIT_METHODS, PackedMask, exchanged, first_mask, largest, num_kept
from headwater.sparsity.schedules import Cadence, Cosine, Cubic, Exponential, Linear, Power


def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.75, 0.9])
@pytest.mark.parametrize("method", INIT_METHODS)
def test_a_first_mask_keeps_its_fraction(method, sparsity):
    weight = torch.randn(17, 23, generator=generator())
    if method == "from_zeros":
        weight *= torch.rand(17, 23, generator=generator()) >= sparsity
    mask = first_mask(weight, sparsity, method, generator())
    assert mask.shape == weight.shape
    assert int(mask.sum()) == (
        int((weight != 0).sum()) if method == "from_zeros" else num_kept(391, sparsity)
    )


def test_the_largest_are_kept_as_torch_prunes_the_smallest():
    linear = torch.nn.Linear(31, 19)
    mask = first_mask(linear.weight.detach(), 0.6, "topk", generator())
    prune.l1_unstructured(linear, "weight", amount=0.6)
    assert torch.equal(mask, linear.weight_mask.bool())


def test_a_checkerboard_is_even():
    mask = first_mask(torch.zeros(8, 40), 0.75, "checkerboard", generator())
    assert mask.sum(1).tolist() == [10] * 8


def test_exchange_replaces_the_smallest_by_the_highest_scores():
    weight = torch.tensor([5.0, -4.0, 3.0, 0.1, 0.0, 0.0, 0.0, 0.0])
    mask = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0]).bool()
    scores = torch.tensor([9.0, 9.0, 9.0, 0.5, 0.2, 0.9, 0.3, 0.1])
    assert exchanged(weight, mask, scores.clone, 0.25).tolist() == [1, 1, 1, 0, 0, 1, 0, 0]
    # What was just dropped comes back where its score is the highest of those that are left.
    assert exchanged(weight, mask, scores.clone, 0.5).tolist() == [1, 1, 1, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 500, 70_000, 99_999, 100_000])
def test_the_largest_are_those_of_torch_and_of_equal_ones_the_first(count, dtype):
    few_values = torch.randint(1000, (1000, 100), generator=generator()).to(dtype)
    for scores in (
        torch.randn(1000, 100, generator=generator()).to(dtype),
        few_values,
        torch.zeros(1000, 100),
    ):
        mask = largest(scores, count)
        assert mask.shape == scores.shape
        order = scores.view(-1).sort(descending=True, stable=True).indices[:count]
        assert torch.equal(mask.view(-1).nonzero().view(-1), order.sort().values)


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 1000])
def test_a_mask_packs_into_bits(numel):
    mask = torch.rand(numel, generator=generator()) < 0.5
    packed = PackedMask(mask)
    assert packed.bits.numel() == math.ceil(numel / 8)
    assert torch.equal(packed.unpack(), mask)
    assert packed.counts(64) == [int(block.sum()) for block in mask.split(64)]
    assert packed.count == int(mask.sum())


def test_schedules():
    assert Linear(0.2, 0.01)(10) == pytest.approx(0.3)
    assert Power(0.5, 0.9)(2) == pytest.approx(0.405)
    assert Exponential(0.2, 0.1, 1.0)(10) == pytest.approx(1 - 0.8 / math.e)
    assert [Cosine(0.3, 100)(step) for step in (0, 50, 100)] == pytest.approx([0.3, 0.15, 0.0])
    assert [Cubic(0.0, 0.8, 10, 20)(step) for step in (0, 15, 20, 99)] == pytest.approx([0.0, 0.7, 0.8, 0.8])
    assert [s for s in range(30) if Cadence(5, 10, 25).includes(s)] == [10, 15, 20]
    assert [s for s in range(12) if Cadence(5).includes(s)] == [5, 10]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"sparsity": 1.5}, "expected a sparsity >= 0 and < 1, got 1.5"),
        ({"sparsity": 0.5, "algorithm": "rigl"}, "needs update"),
        ({"sparsity": 0.5, "algorithm": "set", "update": {"freq": 5}}, "needs drop_fraction"),
        ({"sparsity": 0.5, "init_method": "magic"}, "init_method"),
        ({"sparsity": {"type": "cosin", "init": 1.0}}, "cosin"),
    ],
)
def test_invalid_settings_are_refused(section, message):
    with pytest.raises(ValueError, match=message):
        SparsityConfig.model_validate(section)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_random_mask_does_not_depend_on_the_default_dtype(dtype):
    weight = torch.zeros(40, 30)
    expected = first_mask(weight, 0.5, "random", torch.Generator().manual_seed(3))
    torch.set_default_dtype(dtype)
    try:
        found = first_mask(weight, 0.5, "random", torch.Generator().manual_seed(3))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
