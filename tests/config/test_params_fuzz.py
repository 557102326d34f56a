"""Mutated params files raise the errors of the project alone; `benchmarks.params_fuzz` tries more of them."""

import random

import pytest
from benchmarks.params_fuzz import mutated, text_of

from headwater.config import load_params, shipped_params
from headwater.core.errors import HeadwaterError


@pytest.mark.parametrize("name", ["llama/tiny", "vit/large", "esm2/tiny"])
def test_fuzzed_files_are_valid_before_mutation(name, tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text(text_of(shipped_params()[name]))
    assert load_params(path).init == load_params(shipped_params()[name]).init


def test_two_hundred_mutated_files(tmp_path):
    sources = [text_of(path) for path in shipped_params().values()]
    path, refused = tmp_path / "params.yaml", 0
    for number in range(200):
        random_ = random.Random(f"test {number}")
        path.write_text(mutated(random_.choice(sources), random_))
        try:
            load_params(path)
        except HeadwaterError:
            refused += 1
    assert refused > 100
