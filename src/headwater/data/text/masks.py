"""Choice of the masked tokens of a text."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.int64]

_MASKED, _RANDOM = 0.8, 0.1
"""Fractions of the chosen tokens that are masked, and that are replaced by a random token. The others stay
unchanged (arXiv:1810.04805, section 3.1)."""


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
    """Mask some tokens of a text.

    Args:
        tokens: token ids, [length].
        may_be: True for a token that may be chosen, [length].
        ordinary: ids from which random replacements are drawn.
        mask: id of the mask token.
        share: fraction of the tokens to predict.
        most: maximum number of tokens to predict.
        generator: source of all random choices.

    Returns:
        The tokens after masking, [length], and the positions of the tokens to predict, [predictions].
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
