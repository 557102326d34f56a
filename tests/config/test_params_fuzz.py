"""Mutated params files raise the errors of the project alone; `benchmarks.params_fuzz` tries more of them."""

import random

from benchmarks.params_fuzz import mutated

from headwater.config import load_params, shipped_params
from headwater.core.errors import HeadwaterError


def test_two_hundred_mutated_files(tmp_path):
    sources = [path.read_text() for path in shipped_params().values()]
    path, refused = tmp_path / "params.yaml", 0
    for number in range(200):
        random_ = random.Random(f"test {number}")
        path.write_text(mutated(random_.choice(sources), random_))
        try:
            load_params(path)
        except HeadwaterError:
            refused += 1
    assert refused > 100
