"""The state of a random generator can be read, compared and set."""

import random

import numpy as np
import pytest
import torch

from headwater.core.random_states import set_state, state_of

GENERATORS = {
    "python": (lambda: random.Random(3), lambda generator: generator.gauss(0, 1)),
    "numpy": (lambda: np.random.default_rng(3), lambda generator: float(generator.normal())),
    "old numpy": (lambda: np.random.RandomState(3), lambda generator: float(generator.randn())),
    "torch": (
        lambda: torch.Generator().manual_seed(3),
        lambda generator: torch.randn(3, generator=generator).tolist(),
    ),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_draws_the_same_numbers_again(kind):
    make, draw = GENERATORS[kind]
    generator = make()
    draw(generator)  # some generators keep a second number for the next call
    state = state_of(generator)
    assert state_of(generator) == state
    first = [draw(generator) for _ in range(3)]
    assert state_of(generator) != state
    set_state(generator, state)
    assert [draw(generator) for _ in range(3)] == first


def test_a_generator_of_the_system_has_no_state():
    generator = random.SystemRandom()
    assert state_of(generator) is None
    set_state(generator, None)
