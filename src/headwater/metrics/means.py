"""Metrics that are a weighted mean over labels: accuracy, perplexity, precision and recall at k."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from headwater.core.errors import ConfigError, DataError
from headwater.metrics.metric import Metric, check_shape, weights_like


class _WeightedMean(Metric):
    """Base of the metrics that are a weighted mean; NaN before the first value.

    Args:
        name: name in reports; by default the name of the class.
    """

    total: Tensor
    weight: Tensor

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.register_state("total", torch.zeros((), dtype=torch.float64))
        self.register_state("weight", torch.zeros((), dtype=torch.float64))
        self._dtype = torch.float32

    def _add(self, values: Tensor, weights: Tensor) -> None:
        # A value with weight 0 may be NaN, so that its product is replaced by 0.
        self.total += (values.to(torch.float64) * weights).where(weights != 0, 0).sum()
        self.weight += weights.sum()

    def compute(self) -> Tensor:
        """Return the mean, a scalar."""
        return (self.total / self.weight).to(self._dtype)


class MeanMetric(_WeightedMean):
    """The mean of values.

    Args:
        name: name in reports; by default the name of the class.
    """

    def update(self, values: Tensor | float, weights: Tensor | None = None) -> None:
        """Add values.

        Args:
            values: values of any shape.
            weights: weight of each value, of the same shape; values with weight 0 are ignored.

        Raises:
            DataError: if the shapes differ.
        """
        values = torch.as_tensor(values, device=self.device)
        self._add(values, weights_like(values, weights))


class AccuracyMetric(_WeightedMean):
    """Accuracy: the fraction of predictions that equal their label.

    Args:
        name: name in reports; by default the name of the class.
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
            labels: right classes, of any shape.
            predictions: predicted classes, of the same shape.
            weights: weight of each label, of the same shape, for example an attention mask; labels with
                weight 0 are ignored.
            dtype: dtype of the result of `compute`; by default fp32.

        Raises:
            DataError: if the shapes differ.
        """
        self._dtype = dtype or torch.float32
        hits = labels == check_shape("predictions", predictions, labels)
        self._add(hits, weights_like(labels, weights))


class PerplexityMetric(_WeightedMean):
    """Perplexity: the exponential of the mean cross-entropy of a token.

    Args:
        name: name in reports; by default the name of the class.
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
            labels: right tokens, of any shape.
            loss: cross-entropy in nats: of each token, in the shape of `labels`; or a scalar, the sum over
                all tokens, weighted with `weights`.
            weights: weight of each token, in the shape of `labels`, for example an attention mask; tokens
                with weight 0 are ignored.
            dtype: dtype of the result of `compute`; by default fp32.

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
        """Return the perplexity, a scalar."""
        return (self.total / self.weight).exp().to(self._dtype)


class _AtKMetric(_WeightedMean):
    """Base of the metrics that compare the labels with the `k` classes with the highest scores.

    Args:
        k: number of classes with the highest scores.
        name: name in reports; by default the name of the class.

    Raises:
        ConfigError: if `k` is below 1.
    """

    def __init__(self, k: int, name: str | None = None) -> None:
        if k < 1:
            what = f"expected k of at least 1, got {k}"
            raise ConfigError(what, where=type(self).__name__, remedy="use 1 or more")
        super().__init__(name)
        self.k = k

    def update(self, labels: Tensor, predictions: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            labels: class of each sample [batch], or several classes [batch, num_labels]; negative: no class.
            predictions: scores of all classes, [batch, num_classes].
            weights: weight of each sample, [batch]; samples with weight 0 are ignored.

        Raises:
            DataError: if the shapes do not match.
        """
        labels = labels.reshape(len(labels), -1)
        hits = self._hits(labels, predictions)
        self._add_hits(hits, labels, weights_like(hits.any(1), weights))

    @abc.abstractmethod
    def _add_hits(self, hits: Tensor, labels: Tensor, weights: Tensor) -> None:
        """Add a batch.

        Args:
            hits: True for a label among the top k classes of its sample, [batch, num_labels].
            labels: [batch, num_labels].
            weights: [batch].
        """

    def _hits(self, labels: Tensor, predictions: Tensor) -> Tensor:
        """Return a mask [batch, num_labels], True for a label among the top k classes of its sample."""
        if predictions.dim() != 2 or labels.dim() != 2 or len(labels) != len(predictions):
            raise DataError(
                "expected labels [batch] or [batch, num_labels] and predictions [batch, num_classes], "
                f"got shapes {list(labels.shape)} and {list(predictions.shape)}",
                where=type(self).__name__,
                remedy="pass scores of all classes as predictions, and one row of labels per sample",
            )
        top = predictions.topk(min(self.k, predictions.shape[1]), dim=1).indices
        return (labels.unsqueeze(2) == top.unsqueeze(1)).any(2)


class PrecisionAtKMetric(_AtKMetric):
    """Precision at k: the fraction of the `k` classes with the highest scores that are labels.

    Args:
        k: number of classes with the highest scores.
        name: name in reports; by default the name of the class.
    """

    def _add_hits(self, hits: Tensor, labels: Tensor, weights: Tensor) -> None:
        self._add(hits.sum(1) / self.k, weights)


class RecallAtKMetric(_AtKMetric):
    """Recall at k: the fraction of the labels that are among the `k` classes with the highest scores.

    Args:
        k: number of classes with the highest scores.
        name: name in reports; by default the name of the class.
    """

    def _add_hits(self, hits: Tensor, labels: Tensor, weights: Tensor) -> None:
        self._add(hits, weights.unsqueeze(1) * (labels >= 0))
