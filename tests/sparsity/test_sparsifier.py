"""Masks of parameters: which get one, how it changes, and how it is saved."""

import pytest
import torch

from headwater.core.errors import CheckpointError, ConfigError
from headwater.sparsity.schedules import Cadence, Constant, Linear
from headwater.sparsity.sparsifier import Part, Sparsifier, Sparsity

SHAPES = {
    "embedding.weight": torch.Size([8, 4]),
    "block.weight": torch.Size([4, 8]),
    "block.bias": torch.Size([4]),
    "lm_head.weight": torch.Size([8, 4]),
}
HALF = Sparsity(Constant(0.5))
WEIGHT = torch.arange(1.0, 33.0).view(4, 8)


def unused():
    raise AssertionError("the algorithm needs no gradient")


def begun(sparsity, **options):
    sparsifier = Sparsifier([sparsity], SHAPES, **options)
    return sparsifier, sparsifier.begin("block.weight", WEIGHT)


def test_a_group_without_a_filter_takes_matrices_that_are_neither_embeddings_nor_heads():
    assert list(Sparsifier([HALF], SHAPES).names) == ["block.weight"]


def test_a_parameter_gets_the_first_group_that_takes_its_name():
    first = Sparsity(Constant(0.25), param_filter=("block.*",))
    sparsifier = Sparsifier([first, Sparsity(Constant(0.75), param_filter=("*",))], SHAPES)
    sparsifier.begin("block.weight", WEIGHT)
    sparsifier.begin("embedding.weight", WEIGHT.view(8, 4))
    assert sparsifier.sparsity_of("block.weight") == 0.25
    assert sparsifier.sparsity_of("embedding.weight") == 0.75


def test_a_group_without_a_parameter_is_an_error():
    with pytest.raises(ConfigError, match="no trainable parameter matches layer"):
        Sparsifier([Sparsity(Constant(0.5), param_filter=("layer.*",))], SHAPES)


def test_random_masks_depend_on_seed_and_name_alone():
    masks = [begun(HALF, seed=seed)[1] for seed in (1, 1, 2)]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_parts_of_a_parameter_have_separate_masks():
    top = Sparsity(Constant(0.5), init_method="topk", param_filter=("first",))
    parts = {"block.weight": [Part("first", slice(0, 2)), Part("second", slice(2, 4))]}
    _, mask = begun(top, parts=parts)
    assert mask.int().tolist() == [[0] * 8, [1] * 8, [1] * 8, [1] * 8]


def test_a_growing_sparsity_drops_the_smallest_weights():
    growing = Sparsity(Linear(0.25, 0.25), "gmp", "topk", update=Cadence(1))
    sparsifier, mask = begun(growing)
    assert mask.int().tolist() == [[0] * 8, [1] * 8, [1] * 8, [1] * 8]
    kept = sparsifier.change("block.weight", WEIGHT * mask, unused, 1)
    assert torch.equal(kept, sparsifier.mask_of("block.weight"))
    assert kept.int().tolist() == [[0] * 8, [0] * 8, [1] * 8, [1] * 8]


def test_largest_gradients_replace_the_smallest_weights():
    rigl = Sparsity(Constant(0.5), "rigl", "topk", Constant(0.5), Cadence(2))
    sparsifier, mask = begun(rigl)
    assert sparsifier.changing(1) == []
    assert sparsifier.changing(2) == ["block.weight"]
    gradient = torch.zeros(4, 8)
    gradient[0] = -1.0
    kept = sparsifier.change("block.weight", WEIGHT * mask, lambda: gradient, 2)
    assert sparsifier.mask_of("block.weight").int().tolist() == [[1] * 8, [0] * 8, [0] * 8, [1] * 8]
    assert kept.int().tolist() == [[0] * 8, [0] * 8, [0] * 8, [1] * 8]


def test_masks_are_saved_and_restored():
    sparsifier, mask = begun(HALF)
    other = Sparsifier([HALF], SHAPES, seed=9)
    other.load_state_dict(sparsifier.state_dict())
    assert torch.equal(other.mask_of("block.weight"), mask)
    with pytest.raises(CheckpointError, match="not those of the parameters"):
        other.load_state_dict({"block.weight": torch.zeros(3, dtype=torch.uint8)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": Constant(1.0)}, "expected a sparsity >= 0 and < 1, got 1.0"),
        ({"sparsity": Linear(0.1, 0.1)}, "needs a constant sparsity"),
        ({"sparsity": Constant(0.5), "init_method": "middle"}, "unknown init_method 'middle'"),
    ],
)
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        Sparsity(**options)
