"""Scores out of three counts: how many were found rightly, how many there are, how many were found."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Count = TypeVar("Count", float, Tensor)


def f_beta(hits: Count, labelled: Count, predicted: Count, beta: float = 1.0) -> Count:
    """`(1 + beta²) · precision · recall / (beta² · precision + recall)`; with beta 1, Dice's coefficient too.

    Args:
        hits: of those that are there, how many were found.
        labelled: how many are there.
        predicted: how many were found, rightly or not.
        beta: how much more recall counts than precision.
    """
    square = beta**2
    return (1 + square) * hits / (square * labelled + predicted)


def intersection_over_union(hits: Count, labelled: Count, predicted: Count) -> Count:
    """The share of what is there or was found that is both; arguments as for `f_beta`."""
    return hits / (labelled + predicted - hits)
