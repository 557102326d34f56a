"""The metric pass@k of programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

PASS_AT = (1, 10, 100)
"""Each k for which bigcode-evaluation-harness computes pass@k."""


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the probability that at least one of `k` programs passes, estimated without bias.

    The formula is equation 1 of "Evaluating Large Language Models Trained on Code" (Chen et al. 2021,
    arXiv:2107.03374): 1 - C(n - c, k) / C(n, k). The division is exact.

    Args:
        samples: n, the number of programs that were tried.
        passed: c, the number of those that passed.
        k: at most `samples`.
    """
    return float(1 - Fraction(math.comb(samples - passed, k), math.comb(samples, k)))


def pass_rates(results: Sequence[Sequence[bool]]) -> dict[str, float]:
    """Return the mean of pass@k over problems by its name, for each k of at most the number of programs.

    Args:
        results: for each problem, which of its programs passed.
    """
    most = min(map(len, results), default=0)
    return {
        f"pass@{k}": math.fsum(pass_at_k(len(each), sum(each), k) for each in results) / len(results)
        for k in PASS_AT
        if k <= most
    }
