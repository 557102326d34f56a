"""Metrics that are gathered over the batches of an evaluation, on top of torchmetrics.

Each is called with the tensors of a batch, gives its value so far, and starts anew with `reset`:

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
