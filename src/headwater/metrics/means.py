"""Metrics that are a weighted mean over labels: accuracy, perplexity, precision and recall at k."""

from __future__ import annotations

import torch
from torch import Tensor

from headwater.core.errors import ConfigError, DataError
from headwater.metrics.metric import Metric, check_shape, weights_like


class _WeightedMean(Metric):
    """A weighted mean; NaN before the first value.

    Args:
        name: under which it is reported.
    """

    total: Tensor
    weight: Tensor

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.register_state("total", torch.zeros((), dtype=torch.float64))
        self.register_state("weight", torch.zeros((), dtype=torch.float64))
        self._dtype = torch.float32

    def _add(self, values: Tensor, weights: Tensor) -> None:
        # What is left out may be anything, NaN too.
        self.total += (values.to(torch.float64) * weights).where(weights != 0, 0).sum()
        self.weight += weights.sum()

    def compute(self) -> Tensor:
        """The mean, a scalar."""
        return (self.total / self.weight).to(self._dtype)


class MeanMetric(_WeightedMean):
    """The mean of values.

    Args:
        name: under which it is reported.
    """

    def update(self, values: Tensor | float, weights: Tensor | None = None) -> None:
        """Add values.

        Args:
            values: of any shape.
            weights: of the same shape; 0 leaves a value out.

        Raises:
            DataError: if the shapes differ.
        """
        values = torch.as_tensor(values, device=self.device)
        self._add(values, weights_like(values, weights))


class AccuracyMetric(_WeightedMean):
    """The share of predictions that equal their label.

    Args:
        name: under which it is reported.
    """

    def update(
        self,
        labels: Tensor,
        predictions: Tensor,
        weights: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Add a batch.

        Args:
            labels: of any shape.
            predictions: of the same shape and kind.
            weights: of the same shape, an attention mask for example; 0 leaves a label out.
            dtype: of the value; fp32 if not given.

        Raises:
            DataError: if the shapes differ.
        """
        self._dtype = dtype or torch.float32
        hits = labels == check_shape("predictions", predictions, labels)
        self._add(hits, weights_like(labels, weights))


class PerplexityMetric(_WeightedMean):
    """The exponential of the mean cross-entropy of a token.

    Args:
        name: under which it is reported.
    """

    def update(
        self,
        labels: Tensor,
        loss: Tensor,
        weights: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Add a batch.

        Args:
            labels: the tokens, of any shape.
            loss: their cross-entropy in nats: of each, in the shape of `labels`, or as a scalar the sum over
                those that count, weighted like them.
            weights: of the shape of `labels`, an attention mask for example; 0 leaves a token out.
            dtype: of the value; fp32 if not given.

        Raises:
            DataError: if the shapes differ.
        """
        self._dtype = dtype or torch.float32
        weights = weights_like(labels, weights)
        if loss.dim():
            self._add(check_shape("losses", loss, labels), weights)
        else:
            self.total += loss
            self.weight += weights.sum()

    def compute(self) -> Tensor:
        """The perplexity, a scalar."""
        return (self.total / self.weight).exp().to(self._dtype)


class _AtKMetric(_WeightedMean):
    """What the `k` classes with the highest scores have in common with the labels.

    Args:
        k: classes that count.
        name: under which it is reported.

    Raises:
        ConfigError: if `k` is less than 1.
    """

    def __init__(self, k: int, name: str | None = None) -> None:
        if k < 1:
            raise ConfigError(f"k is {k}", where=type(self).__name__, remedy="write 1 or more")
        super().__init__(name)
        self.k = k

    def _hits(self, labels: Tensor, predictions: Tensor) -> Tensor:
        """Whether each label [batch, num_labels] is among the top k of its row of scores."""
        if predictions.dim() != 2 or labels.dim() != 2 or len(labels) != len(predictions):
            raise DataError(
                f"labels have shape {list(labels.shape)}, predictions {list(predictions.shape)}",
                where=type(self).__name__,
                remedy="give labels [batch] or [batch, num_labels] and predictions [batch, num_classes]",
            )
        top = predictions.topk(min(self.k, predictions.shape[1]), dim=1).indices
        return (labels.unsqueeze(2) == top.unsqueeze(1)).any(2)


class PrecisionAtKMetric(_AtKMetric):
    """Of the `k` classes with the highest scores, the share that are labels.

    Args:
        k: classes that count.
        name: under which it is reported.
    """

    def update(self, labels: Tensor, predictions: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            labels: class of each sample [batch], or several [batch, num_labels]; negative: none.
            predictions: scores [batch, num_classes].
            weights: of the samples [batch]; 0 leaves one out.

        Raises:
            DataError: if the shapes do not go together.
        """
        labels = labels.reshape(len(labels), -1)
        hits = self._hits(labels, predictions).sum(1)
        self._add(hits / self.k, weights_like(hits, weights))


class RecallAtKMetric(_AtKMetric):
    """Of the labels, the share that are among the `k` classes with the highest scores.

    Args:
        k: classes that count.
        name: under which it is reported.
    """

    def update(self, labels: Tensor, predictions: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            labels: class of each sample [batch], or several [batch, num_labels]; negative: none.
            predictions: scores [batch, num_classes].
            weights: of the samples [batch]; 0 leaves one out.

        Raises:
            DataError: if the shapes do not go together.
        """
        labels = labels.reshape(len(labels), -1)
        hits = self._hits(labels, predictions)
        self._add(hits, weights_like(labels[:, 0], weights).unsqueeze(1) * (labels >= 0))
