"""Scores computed from three counts: correct predictions, labelled items and predicted items."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Count = TypeVar("Count", float, Tensor)


def f_beta(hits: Count, labelled: Count, predicted: Count, beta: float = 1.0) -> Count:
    """Return `(1 + beta²) · precision · recall / (beta² · precision + recall)`. For beta 1: Dice's.

    Args:
        hits: how many labelled items were predicted.
        labelled: number of labelled items.
        predicted: number of predicted items, right or wrong.
        beta: weight of recall relative to precision.
    """
    square = beta**2
    return (1 + square) * hits / (square * labelled + predicted)


def intersection_over_union(hits: Count, labelled: Count, predicted: Count) -> Count:
    """Return (items both labelled and predicted) / (items labelled or predicted); see `f_beta`."""
    return hits / (labelled + predicted - hits)
