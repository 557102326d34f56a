"""The area under the curve of a binary classifier, from a histogram of its scores."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from headwater.core.errors import ConfigError, DataError
from headwater.metrics.metric import Metric, check_shape, weights_like


class AUCMetric(Metric):
    """The area under the ROC curve, or the average precision.

    Scores fall into bins of equal width; those in one bin count as equal. The memory it takes does not grow.

    Args:
        num_thresholds: bins.
        curve: `ROC`, or `PR` for the average precision: the sum of precision times the gain in recall over
            the thresholds.
        name: under which it is reported.

    Raises:
        ConfigError: if an argument is out of range.
    """

    histogram: Tensor

    def __init__(
        self, num_thresholds: int = 200, curve: Literal["ROC", "PR"] = "ROC", name: str | None = None
    ) -> None:
        if num_thresholds < 2:
            raise ConfigError(
                f"num_thresholds is {num_thresholds}", where="AUCMetric", remedy="write 2 or more"
            )
        if curve not in ("ROC", "PR"):
            raise ConfigError(f"curve is {curve!r}", where="AUCMetric", remedy="write ROC or PR")
        super().__init__(name)
        self.num_thresholds = num_thresholds
        self.curve = curve
        self.register_state("histogram", torch.zeros(2, num_thresholds, dtype=torch.float64))

    def update(self, labels: Tensor, predictions: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            labels: 0 or 1, of any shape.
            predictions: scores from 0 to 1, of the same shape.
            weights: of the same shape, an attention mask for example; 0 leaves a label out, whatever it is.

        Raises:
            DataError: if the shapes differ, or a label or score that counts is out of range.
        """
        check_shape("predictions", predictions, labels)
        weights = weights_like(labels, weights)
        counted = weights != 0
        labels, scores, weights = labels[counted], predictions[counted].double(), weights[counted]
        if bool((((labels != 0) & (labels != 1)) | ~((scores >= 0) & (scores <= 1))).any()):
            raise DataError(
                "labels are 0 or 1 and scores lie between 0 and 1",
                where=self.name,
                remedy="apply a sigmoid to logits, and give weights of 0 to what is not to be counted",
            )
        bins = (scores * self.num_thresholds).long().clamp_max(self.num_thresholds - 1)
        cells = labels.long() * self.num_thresholds + bins
        counts = torch.bincount(cells, weights, minlength=self.histogram.numel())
        self.histogram += counts.view_as(self.histogram)

    def compute(self) -> Tensor:
        """The area, a scalar; NaN if one of the classes does not occur."""
        # Negatives and positives at or above each threshold, from the highest threshold down to the lowest.
        false, true = self.histogram.flip(1).cumsum(1).unbind()
        if self.curve == "ROC":
            zero = false.new_zeros(1)
            true, false = torch.cat((zero, true / true[-1])), torch.cat((zero, false / false[-1]))
            area: Tensor = torch.trapezoid(true, false)
            return area.float()
        gains = torch.diff(true, prepend=true.new_zeros(1)) / true[-1]
        precision = (true / (true + false)).nan_to_num()  # of thresholds that nothing reaches
        return (precision * gains).sum().float()
