"""Weights in files are matched with the parameters of stages by name, and refused where they do not fit."""

import pytest
import torch
from safetensors.torch import save_file

from headwater.core.errors import CheckpointError
from headwater.core.safetensors import TensorFile, read_runs
from headwater.core.stage import MAY_BE_MISSING, ParamSpec, StageSpec
from headwater.store.saved_weights import SavedWeights

STAGE = StageSpec(
    0,
    "s",
    (
        ParamSpec("weight", (2, 3), torch.float32, torch.bfloat16, aliases=("tied",)),
        ParamSpec("bias", (2,), torch.float32, torch.bfloat16),
    ),
)
TENSORS = {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(2)}


@pytest.fixture
def weights(tmp_path):
    """Return a function that saves tensors and matches them with the stage."""

    def match(tensors, *, exact=False, strict=True, buffers=None, **options):
        save_file(tensors, tmp_path / "w.safetensors")
        files = [TensorFile(tmp_path / "w.safetensors")]
        return SavedWeights(files, [STAGE], buffers or {}, exact=exact, strict=strict, **options)

    return match


def read(found, name, start, count):
    """Return `count` elements of a parameter or buffer from `start` on."""
    return next(read_runs([found.run(name, start, count)]))


def test_a_run_of_elements_is_read(weights):
    assert read(weights(TENSORS), "weight", 2, 3).tolist() == [2.0, 3.0, 4.0]


def test_a_parameter_is_found_by_its_second_name(weights):
    found = weights({"tied": TENSORS["weight"], "bias": TENSORS["bias"]})
    assert read(found, "weight", 0, 2).tolist() == [0.0, 1.0]


def test_a_parameter_is_found_by_the_name_in_other_files(weights):
    found = weights(
        {"w.weight": TENSORS["weight"], "w.bias": TENSORS["bias"]}, names=lambda name: (name, f"w.{name}")
    )
    assert "weight" in found and read(found, "bias", 0, 2).tolist() == [1.0, 1.0]


def test_buffers_are_matched_too(weights):
    found = weights(TENSORS | {"mean": torch.zeros(1)}, buffers={"mean": torch.ones(1)})
    assert read(found, "mean", 0, 1).tolist() == [0.0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"bias": None}, "bias is missing"),
        ({"bios": torch.ones(2)}, "the model has no bios; it has bias"),
        ({"bias": torch.ones(3)}, r"bias has shape \(3,\) in the file and \(2,\) in the model"),
        ({"bias": torch.ones(2, dtype=torch.int64)}, "bias is torch.int64 in the file"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, change, told):
    changed = {name: tensor for name, tensor in (TENSORS | change).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=told):
        weights(changed)


def test_another_floating_point_dtype_is_refused_only_for_an_exact_copy(weights):
    half = {name: tensor.half() for name, tensor in TENSORS.items()}
    assert read(weights(half), "bias", 0, 2).dtype == torch.float16
    with pytest.raises(CheckpointError, match=r"torch\.float16 in the file"):
        weights(half, exact=True)


def test_missing_and_unknown_parameters_are_left_out_where_that_is_allowed(weights):
    few = {"weight": TENSORS["weight"], "other": torch.ones(1)}
    assert "bias" not in weights(few, strict=False)
    only = weights({"weight": TENSORS["weight"]}, names=lambda name: (name, MAY_BE_MISSING))
    assert "bias" not in only and "weight" in only
