"""Metrics that are computed from a confusion matrix: F-beta, mean IoU, Dice, mean accuracy per class."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from headwater.core.errors import ConfigError, DataError
from headwater.core.scores import f_beta, intersection_over_union
from headwater.metrics.metric import Metric, check_shape, weights_like


class _ConfusionMetric(Metric, abc.ABC):
    """Base of the metrics that are computed from a confusion matrix.

    Args:
        num_classes: number of classes; labels and predictions are in `range(num_classes)`.
        name: name in reports; by default the name of the class.

    Raises:
        ConfigError: if `num_classes` is below 1.
    """

    matrix: Tensor

    def __init__(self, num_classes: int, name: str | None = None) -> None:
        if num_classes < 1:
            raise ConfigError(
                f"expected num_classes of at least 1, got {num_classes}",
                where=type(self).__name__,
                remedy="use 1 or more",
            )
        super().__init__(name)
        self.num_classes = num_classes
        self.register_state("matrix", torch.zeros(num_classes, num_classes, dtype=torch.float64))
        self._dtype = torch.float32

    def update(
        self,
        labels: Tensor,
        predictions: Tensor,
        weights: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Add a batch.

        Args:
            labels: right classes, of any shape.
            predictions: predicted classes, of the same shape.
            weights: weight of each label, of the same shape, for example an attention mask; labels with
                weight 0 are ignored and may have any value.
            dtype: dtype of the result of `compute`; by default fp32.

        Raises:
            DataError: if the shapes differ, or a class with a weight other than 0 is out of range.
        """
        self._dtype = dtype or torch.float32
        check_shape("predictions", predictions, labels)
        weights = weights_like(labels, weights)
        counted = weights != 0
        pairs = torch.stack((labels[counted], predictions[counted])).long()
        if pairs.numel() and not 0 <= int(pairs.min()) <= int(pairs.max()) < self.num_classes:
            raise DataError(
                f"expected classes in range({self.num_classes}), got classes from {int(pairs.min())} to "
                f"{int(pairs.max())}",
                where=self.name,
                remedy="use weight 0 for labels that do not count, or a larger num_classes",
            )
        cells = pairs[0] * self.num_classes + pairs[1]
        counts = torch.bincount(cells, weights[counted], minlength=self.matrix.numel())
        self.matrix += counts.view_as(self.matrix)

    def compute(self) -> Tensor:
        """Return the metric over all batches, a scalar."""
        hits = self.matrix.diagonal()
        return self._value(hits, self.matrix.sum(1), self.matrix.sum(0)).to(self._dtype)

    @abc.abstractmethod
    def _value(self, hits: Tensor, labelled: Tensor, predicted: Tensor) -> Tensor:
        """Return the metric from the weighted counts of each class, each [num_classes].

        Args:
            hits: labels of the class that were predicted correctly.
            labelled: labels of the class.
            predicted: predictions of the class.
        """


class MeanIOUMetric(_ConfusionMetric):
    """Mean intersection over union of the classes that occur in labels or predictions.

    Args:
        num_classes: number of classes; labels and predictions are in `range(num_classes)`.
        name: name in reports; by default the name of the class.
    """

    def _value(self, hits: Tensor, labelled: Tensor, predicted: Tensor) -> Tensor:
        return intersection_over_union(hits, labelled, predicted).nanmean()


class DiceCoefficientMetric(_ConfusionMetric):
    """Mean Dice coefficient of the classes that occur in labels or predictions.

    The coefficient is twice the intersection divided by the sum of the sizes.

    Args:
        num_classes: number of classes; labels and predictions are in `range(num_classes)`.
        name: name in reports; by default the name of the class.
    """

    def _value(self, hits: Tensor, labelled: Tensor, predicted: Tensor) -> Tensor:
        return f_beta(hits, labelled, predicted).nanmean()


class MeanPerClassAccuracyMetric(_ConfusionMetric):
    """Mean recall of the classes that occur in labels.

    Args:
        num_classes: number of classes; labels and predictions are in `range(num_classes)`.
        name: name in reports; by default the name of the class.
    """

    def _value(self, hits: Tensor, labelled: Tensor, predicted: Tensor) -> Tensor:
        return (hits / labelled).nanmean()


class FBetaScoreMetric(_ConfusionMetric):
    """F-beta score: `(1 + beta²) · precision · recall / (beta² · precision + recall)`.

    Args:
        num_classes: number of classes; labels and predictions are in `range(num_classes)`.
        beta: weight of recall relative to precision.
        average_type: `micro`: add up the counts of all classes; `macro`: mean of the scores of the classes,
            in which a class that does not occur has score 0.
        ignore_labels: classes that are left out.
        name: name in reports; by default the name of the class.

    Raises:
        ConfigError: if an argument is out of range.
    """

    def __init__(
        self,
        num_classes: int,
        beta: float = 1.0,
        average_type: Literal["micro", "macro"] = "micro",
        ignore_labels: Sequence[int] | None = None,
        name: str | None = None,
    ) -> None:
        if beta <= 0:
            raise ConfigError(
                f"expected beta above 0, got {beta}", where="FBetaScoreMetric", remedy="use a positive number"
            )
        if average_type not in ("micro", "macro"):
            raise ConfigError(
                f"expected average_type 'micro' or 'macro', got {average_type!r}",
                where="FBetaScoreMetric",
                remedy="use micro or macro",
            )
        super().__init__(num_classes, name)
        self.beta = beta
        self.average_type = average_type
        ignored = set(ignore_labels or ())
        self._kept = [index for index in range(num_classes) if index not in ignored]

    def _value(self, hits: Tensor, labelled: Tensor, predicted: Tensor) -> Tensor:
        hits, labelled, predicted = (counts[self._kept] for counts in (hits, labelled, predicted))
        if self.average_type == "micro":
            hits, labelled, predicted = hits.sum(), labelled.sum(), predicted.sum()
        return f_beta(hits, labelled, predicted, self.beta).nan_to_num().mean()
