"""Area under the curve of a binary classifier, computed from a histogram of its scores."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from headwater.core.errors import ConfigError, DataError
from headwater.metrics.metric import Metric, check_shape, weights_like


class AUCMetric(Metric):
    """The area under the ROC curve, or the average precision.

    Scores are counted in bins of equal width; scores in the same bin count as equal. The memory does not grow
    with the number of batches.

    Args:
        num_thresholds: number of bins.
        curve: `ROC`, or `PR` for the average precision: the sum over the thresholds of the precision times
            the increase in recall.
        name: name in reports; by default the name of the class.

    Raises:
        ConfigError: if an argument is out of range.
    """

    histogram: Tensor

    def __init__(
        self, num_thresholds: int = 200, curve: Literal["ROC", "PR"] = "ROC", name: str | None = None
    ) -> None:
        if num_thresholds < 2:
            raise ConfigError(
                f"expected num_thresholds of at least 2, got {num_thresholds}",
                where="AUCMetric",
                remedy="use 2 or more",
            )
        if curve not in ("ROC", "PR"):
            what = f"expected curve 'ROC' or 'PR', got {curve!r}"
            raise ConfigError(what, where="AUCMetric", remedy="use ROC or PR")
        super().__init__(name)
        self.num_thresholds = num_thresholds
        self.curve = curve
        self.register_state("histogram", torch.zeros(2, num_thresholds, dtype=torch.float64))

    def update(self, labels: Tensor, predictions: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            labels: 0 or 1, of any shape.
            predictions: scores in [0, 1], of the same shape.
            weights: weight of each label, of the same shape, for example an attention mask; labels with
                weight 0 are ignored and may have any value.

        Raises:
            DataError: if the shapes differ, or a label or score with a weight other than 0 is out of range.
        """
        check_shape("predictions", predictions, labels)
        weights = weights_like(labels, weights)
        counted = weights != 0
        labels, scores, weights = labels[counted], predictions[counted].double(), weights[counted]
        if bool((((labels != 0) & (labels != 1)) | ~((scores >= 0) & (scores <= 1))).any()):
            raise DataError(
                "expected labels in {0, 1} and scores in [0, 1], got "
                f"labels from {labels.min().item():g} to {labels.max().item():g} and "
                f"scores from {scores.min().item():g} to {scores.max().item():g}",
                where=self.name,
                remedy="apply a sigmoid to logits, and use weight 0 for labels that do not count",
            )
        bins = (scores * self.num_thresholds).long().clamp_max(self.num_thresholds - 1)
        cells = labels.long() * self.num_thresholds + bins
        counts = torch.bincount(cells, weights, minlength=self.histogram.numel())
        self.histogram += counts.view_as(self.histogram)

    def compute(self) -> Tensor:
        """Return the area, a scalar; NaN if one of the two classes does not occur."""
        # Negatives and positives at or above each threshold, from the highest threshold down to the lowest.
        false, true = self.histogram.flip(1).cumsum(1).unbind()
        if self.curve == "ROC":
            zero = false.new_zeros(1)
            true, false = torch.cat((zero, true / true[-1])), torch.cat((zero, false / false[-1]))
            area: Tensor = torch.trapezoid(true, false)
            return area.float()
        gains = torch.diff(true, prepend=true.new_zeros(1)) / true[-1]
        precision = (true / (true + false)).nan_to_num()  # NaN at thresholds above all scores
        return (precision * gains).sum().float()
