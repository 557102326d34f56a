"""Metrics that follow from a confusion matrix: F-beta, mean IoU, Dice, mean accuracy of the classes."""

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
    """A value that follows from how often each class was taken for each other.

    Args:
        num_classes: labels and predictions lie in `range(num_classes)`.
        name: under which it is reported.

    Raises:
        ConfigError: if there is no class.
    """

    matrix: Tensor

    def __init__(self, num_classes: int, name: str | None = None) -> None:
        if num_classes < 1:
            raise ConfigError(
                f"num_classes is {num_classes}", where=type(self).__name__, remedy="write 1 or more"
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
            labels: classes, of any shape.
            predictions: classes, of the same shape.
            weights: of the same shape, an attention mask for example; 0 leaves a label out, whatever it is.
            dtype: of the value; fp32 if not given.

        Raises:
            DataError: if the shapes differ, or a class that counts is out of range.
        """
        self._dtype = dtype or torch.float32
        check_shape("predictions", predictions, labels)
        weights = weights_like(labels, weights)
        counted = weights != 0
        pairs = torch.stack((labels[counted], predictions[counted])).long()
        if pairs.numel() and not 0 <= int(pairs.min()) <= int(pairs.max()) < self.num_classes:
            raise DataError(
                f"classes lie between {int(pairs.min())} and {int(pairs.max())}, not in "
                f"range({self.num_classes})",
                where=self.name,
                remedy="give weights of 0 to what is not to be counted, or a larger num_classes",
            )
        cells = pairs[0] * self.num_classes + pairs[1]
        counts = torch.bincount(cells, weights[counted], minlength=self.matrix.numel())
        self.matrix += counts.view_as(self.matrix)

    def compute(self) -> Tensor:
        """The value, a scalar."""
        hits = self.matrix.diagonal()
        return self._value(hits, self.matrix.sum(1), self.matrix.sum(0)).to(self._dtype)

    @abc.abstractmethod
    def _value(self, hits: Tensor, labelled: Tensor, predicted: Tensor) -> Tensor:
        """The value from how often each class was found, is right and was predicted, each [num_classes]."""


class MeanIOUMetric(_ConfusionMetric):
    """Intersection over union, the mean over the classes that occur in labels or predictions.

    Args:
        num_classes: labels and predictions lie in `range(num_classes)`.
        name: under which it is reported.
    """

    def _value(self, hits: Tensor, labelled: Tensor, predicted: Tensor) -> Tensor:
        return intersection_over_union(hits, labelled, predicted).nanmean()


class DiceCoefficientMetric(_ConfusionMetric):
    """Twice the intersection over the sum of sizes, the mean over the classes that occur.

    Args:
        num_classes: labels and predictions lie in `range(num_classes)`.
        name: under which it is reported.
    """

    def _value(self, hits: Tensor, labelled: Tensor, predicted: Tensor) -> Tensor:
        return f_beta(hits, labelled, predicted).nanmean()


class MeanPerClassAccuracyMetric(_ConfusionMetric):
    """The share of each class's labels that were found, the mean over the classes that occur in labels.

    Args:
        num_classes: labels and predictions lie in `range(num_classes)`.
        name: under which it is reported.
    """

    def _value(self, hits: Tensor, labelled: Tensor, predicted: Tensor) -> Tensor:
        return (hits / labelled).nanmean()


class FBetaScoreMetric(_ConfusionMetric):
    """`(1 + beta²) · precision · recall / (beta² · precision + recall)`.

    Args:
        num_classes: labels and predictions lie in `range(num_classes)`.
        beta: how much more recall counts than precision.
        average_type: `micro` counts all classes together, `macro` takes the mean over them; a class that
            does not occur counts as 0.
        ignore_labels: classes whose hits and misses are not counted.
        name: under which it is reported.

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
            raise ConfigError(f"beta is {beta}", where="FBetaScoreMetric", remedy="write a number above 0")
        if average_type not in ("micro", "macro"):
            raise ConfigError(
                f"average_type is {average_type!r}", where="FBetaScoreMetric", remedy="write micro or macro"
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
