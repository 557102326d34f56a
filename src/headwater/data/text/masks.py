"""Which tokens of a text are to be guessed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.int64]

_MASKED, _RANDOM = 0.8, 0.1
"""Of the chosen tokens so many are masked, so many become another one, and the rest stays
(arXiv:1810.04805, section 3.1)."""


def choose_masks(
    tokens: Values,
    may_be: npt.NDArray[np.bool_],
    *,
    ordinary: npt.NDArray[np.integer[Any]],
    mask: int,
    share: float,
    most: int,
    generator: np.random.Generator,
) -> tuple[Values, Values]:
    """Tokens of which some are masked, and the places of those that are to be guessed.

    Args:
        tokens: [length].
        may_be: whether a token may be chosen, [length].
        ordinary: tokens that may stand in the place of another.
        mask: token that hides another.
        share: of the tokens that are guessed.
        most: of them.
        generator: draws them.
    """
    places = np.flatnonzero(may_be)
    count = min(most, max(1, round(len(places) * share)), len(places))
    chosen = np.sort(generator.permutation(places)[:count])
    kind = generator.random(count)
    hidden = tokens.copy()
    hidden[chosen] = np.where(
        kind < _MASKED,
        mask,
        np.where(kind < _MASKED + _RANDOM, generator.choice(ordinary, count), tokens[chosen]),
    )
    return hidden, chosen
