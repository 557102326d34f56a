"""Draws random programs: models of several PyTorch features, and loops that train them."""

from __future__ import annotations

import random
from collections.abc import Mapping

from headwater.conform.grammar import flow, layers, loops, state, structure, weights  # noqa: F401 fill KINDS
from headwater.conform.grammar.kinds import KINDS
from headwater.conform.grammar.program import Program, draw_piece
from headwater.conform.grammar.settings import SETTINGS
from headwater.core.precision import PrecisionName

LARGEST = (3, 2)
"""The most features of a program's model and of its loop."""


AUTOCAST: Mapping[PrecisionName, str | None] = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}
"""Precision -> the dtype of the autocast around the forwards of a program, a name of torch."""


def draw(
    seed: int,
    case: int,
    attempt: int = 0,
    largest: tuple[int, int] = LARGEST,
    precision: PrecisionName = "fp32",
) -> Program:
    """Return the random program of a case; each attempt returns another one.

    Args:
        seed: seed of the campaign.
        case: number of the case.
        attempt: number of the attempt.
        largest: the most features of the model and of the loop.
        precision: precision of the forwards. The features do not depend on it.
    """
    generator = random.Random(f"{seed} {case} {attempt}")
    kinds = {flag: [kind for kind in KINDS.values() if kind.in_loop is flag] for flag in (False, True)}
    chosen = [
        generator.choice(kinds[flag])
        for flag, most in zip((False, True), largest, strict=True)
        for _ in range(generator.randint(0 if flag else 1, most))
    ]
    pieces = tuple(draw_piece(generator, kind, number) for number, kind in enumerate(chosen, start=1))
    return Program(case, draw_piece(generator, SETTINGS, 0), pieces, AUTOCAST[precision])
