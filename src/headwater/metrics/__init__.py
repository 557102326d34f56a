"""Metrics over all batches of an evaluation, built on torchmetrics.

A call with the tensors of a batch adds the batch and returns the value so far. `reset` starts again:

    accuracy = AccuracyMetric(name="eval/accuracy")
    for labels, predictions, mask in batches:
        accuracy(labels=labels, predictions=predictions, weights=mask)
    print(float(accuracy.compute()))
"""

from headwater.core.errors import ConfigError

try:
    import torchmetrics  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torchmetrics":
        raise
    raise ConfigError("metrics need torchmetrics", remedy="pip install 'headwater[metrics]'") from error

from headwater.metrics.auc import AUCMetric
from headwater.metrics.classes import (
    DiceCoefficientMetric,
    FBetaScoreMetric,
    MeanIOUMetric,
    MeanPerClassAccuracyMetric,
)
from headwater.metrics.means import (
    AccuracyMetric,
    MeanMetric,
    PerplexityMetric,
    PrecisionAtKMetric,
    RecallAtKMetric,
)
from headwater.metrics.metric import Metric

__all__ = [
    "AUCMetric",
    "AccuracyMetric",
    "DiceCoefficientMetric",
    "FBetaScoreMetric",
    "MeanIOUMetric",
    "MeanMetric",
    "MeanPerClassAccuracyMetric",
    "Metric",
    "PerplexityMetric",
    "PrecisionAtKMetric",
    "RecallAtKMetric",
]
