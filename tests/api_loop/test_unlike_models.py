"""Models that differ between ranks end in an error on every rank."""

import json
import os
import subprocess
import sys

import pytest
import unlike_models_script

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The outcomes by name, of rank 0 and of rank 1."""
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


def test_ranks_with_the_same_model_train_after_such_an_error(outcomes):
    assert [each["no_change"] for each in outcomes] == ["trained", "trained"]


def test_sparse_gradients_are_refused_on_every_rank(outcomes):
    for each in outcomes:
        assert "expected a dense gradient with several ranks, got a sparse one" in each["sparse"]
        assert "build the embedding with sparse=False, or train on one rank" in each["sparse"]
