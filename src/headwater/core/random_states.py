"""Reading and setting of the states of random generators of Python, numpy and torch."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""The classes whose instances draw random numbers."""

DEFAULTS = (random._inst, np.random.mtrand._rand)
"""The generators behind the functions of Python's `random` and of `numpy.random`."""


def state_of(generator: Any) -> Any:
    """Return the state of a generator, as a value that `==` compares. `None` if it cannot be set."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    # Before `Random`, which it inherits from.
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        # As bytes: states hold arrays, whose comparison is not one truth value.
        return pickle.dumps(generator.bit_generator.state)
    return pickle.dumps(generator.get_state(legacy=False))


def set_state(generator: Any, state: Any) -> None:
    """Set a generator to the state that `state_of` has returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.SystemRandom):
        return
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = pickle.loads(state)
    else:
        generator.set_state(pickle.loads(state))
