"""Models that differ between ranks raise an error on every rank."""

import json
import os
import subprocess
import sys

import pytest
import unlike_models_script
from torch.testing import assert_close

import headwater as hw

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return the outcomes of rank 0 and of rank 1, by name."""
    folder = tmp_path_factory.mktemp("unlike")
    done = subprocess.run(
        [sys.executable, unlike_models_script.__file__, folder], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (
            "layer_of_the_same_shape",
            "2.weight: rank 0 has a streamed, trained parameter [8, 8] float32, "
            "rank 1 has a new, trained parameter [8, 8] float32",
        ),
        ("layer_without_bias", "2.weight: rank 0 has a streamed"),
        ("activation", "1: rank 0 has a module Tanh, rank 1 has a module ReLU"),
        ("added_parameter", "more: rank 0 has nothing, rank 1 has a new, trained parameter [2] float32"),
        ("removed_layer", "3: rank 0 has a module Tanh, rank 1 has a module Linear"),
        (
            "frozen_parameter",
            "2.weight: rank 0 has a streamed, trained parameter [8, 8] float32, "
            "rank 1 has a streamed, frozen parameter [8, 8] float32",
        ),
        ("frozen_then_other", "0.weight: rank 0 has a streamed, frozen parameter [8, 4] float32, rank 1 has"),
        (
            "unfrozen_parameter",
            "0.weight: rank 0 has a streamed, frozen parameter [8, 4] float32, rank 1 has",
        ),
    ],
)
def test_a_model_that_changes_on_one_rank_only_is_refused_on_every_rank(outcomes, change, difference):
    first, second = (each[change] for each in outcomes)
    assert first == second
    assert f"expected the same model on all ranks, found a difference at {difference}" in first
    assert "make the same changes to the model on every rank" in first


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("learning_rate", "lr of parameter group 0: rank 0 has 0.1, rank 1 has 0.01"),
        ("momentum", "momentum of parameter group 1: rank 0 has 0, rank 1 has 0.9"),
        ("tensor_rate", "lr of parameter group 1: rank 0 has 0.1, rank 1 has 0.3"),
        ("groups_swapped", "the parameters of parameter group 0: rank 0 has 2 with the checksum"),
    ],
)
def test_options_that_differ_between_ranks_are_refused_on_every_rank(outcomes, change, difference):
    first, second = (each[change] for each in outcomes)
    assert first == second
    assert f"expected the same options on all ranks, found a difference at {difference}" in first
    assert "set the same options on every rank" in first


@pytest.mark.parametrize("schedule", unlike_models_script.SCHEDULES)
def test_options_that_change_on_all_ranks_equal_one_rank_and_plain_pytorch(outcomes, schedule):
    plain = unlike_models_script.trained_with(schedule, hw.backend("CPU"))
    one = unlike_models_script.trained_with(schedule, hw.backend("CSX"))
    assert one == plain
    for each in outcomes:
        assert_close(each[schedule], plain, rtol=1e-5, atol=1e-7)
    assert outcomes[0][schedule] == outcomes[1][schedule]


def test_ranks_with_the_same_model_train_after_such_an_error(outcomes):
    assert [each["no_change"] for each in outcomes] == ["trained", "trained"]


def test_sparse_gradients_are_refused_on_every_rank(outcomes):
    for each in outcomes:
        assert "expected a dense gradient with several ranks, got a sparse one" in each["sparse"]
        assert "build the embedding with sparse=False, or train on one rank" in each["sparse"]
