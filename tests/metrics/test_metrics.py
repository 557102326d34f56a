"""Metrics compared with torchmetrics, which has no weights: a weight of n is n equal samples there."""

import importlib
import sys

import pytest
import torch
import torchmetrics.functional as oracle
from torchmetrics.functional import classification

from headwater.core.errors import ConfigError, DataError
from headwater.metrics import (
    AccuracyMetric,
    AUCMetric,
    DiceCoefficientMetric,
    FBetaScoreMetric,
    MeanIOUMetric,
    MeanMetric,
    MeanPerClassAccuracyMetric,
    Metric,
    PerplexityMetric,
    PrecisionAtKMetric,
    RecallAtKMetric,
)

CLASSES = 5
BINS = 16


def batches(make, count=3):
    """Return (labels, predictions, weights) of some batches; `make` makes predictions from a generator."""
    generator = torch.Generator().manual_seed(0)
    for size in range(6, 6 + count):
        labels = torch.randint(0, CLASSES, (size, 4), generator=generator)
        weights = torch.randint(0, 4, (size, 4), generator=generator)
        yield labels, make(labels, generator), weights


def classes(labels, generator):
    return torch.where(
        torch.rand(labels.shape, generator=generator) < 0.5,
        labels,
        torch.randint(0, CLASSES, labels.shape, generator=generator),
    )


def scores(labels, generator):
    """Return scores at the lower edges of bins, so that binning does not change the result."""
    return torch.randint(0, BINS, labels.shape, generator=generator) / BINS


def gathered(make):
    """Return all batches as one, with each sample repeated by its weight."""
    parts = [[t.flatten() for t in batch] for batch in batches(make)]
    labels, predictions, weights = (torch.cat(part) for part in zip(*parts, strict=True))
    return labels.repeat_interleave(weights), predictions.repeat_interleave(weights)


def multiclass(function, **options):
    def value(labels, predictions):
        return function(predictions, labels, num_classes=CLASSES, **options)

    return value


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        (AccuracyMetric(), multiclass(classification.multiclass_accuracy, average="micro")),
        (MeanPerClassAccuracyMetric(CLASSES), multiclass(classification.multiclass_accuracy)),
        (MeanIOUMetric(CLASSES), multiclass(classification.multiclass_jaccard_index)),
        (DiceCoefficientMetric(CLASSES), multiclass(classification.multiclass_f1_score)),
        (FBetaScoreMetric(CLASSES),
         multiclass(classification.multiclass_fbeta_score, beta=1.0, average="micro")),
        (FBetaScoreMetric(CLASSES, beta=2.0, average_type="macro"),
         multiclass(classification.multiclass_fbeta_score, beta=2.0)),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_classes(metric, expected):
    for labels, predictions, weights in batches(classes):
        metric(labels=labels, predictions=predictions, weights=weights)
    assert metric.num_updates == 3
    assert float(metric.compute()) == pytest.approx(float(expected(*gathered(classes))), rel=1e-6)


def test_fbeta_of_some_classes():
    metric = FBetaScoreMetric(CLASSES, beta=0.5, ignore_labels=[0, 3])
    macro = FBetaScoreMetric(CLASSES, beta=0.5, average_type="macro", ignore_labels=[0, 3])
    for batch in batches(classes):
        metric(*batch)
        macro(*batch)
    labels, predictions = gathered(classes)
    kept = torch.tensor([1, 2, 4])
    found = torch.stack([((labels == c) & (predictions == c)).sum() for c in kept])
    wrong = torch.stack([((labels != c) & (predictions == c)).sum() for c in kept])
    missed = torch.stack([((labels == c) & (predictions != c)).sum() for c in kept])

    def score(tp, fp, fn):
        return 1.25 * tp / (1.25 * tp + 0.25 * fn + fp)

    assert float(metric.compute()) == pytest.approx(float(score(found.sum(), wrong.sum(), missed.sum())))
    assert float(macro.compute()) == pytest.approx(float(score(found, wrong, missed).mean()))


@pytest.mark.parametrize(
    ("curve", "expected"),
    [("ROC", classification.binary_auroc), ("PR", classification.binary_average_precision)],
)
def test_auc(curve, expected):
    metric = AUCMetric(BINS, curve)
    for labels, predictions, weights in batches(scores):
        metric(labels=labels % 2, predictions=predictions, weights=weights)
    labels, predictions = gathered(scores)
    assert float(metric.compute()) == pytest.approx(float(expected(predictions, labels % 2)), rel=1e-6)


def test_many_thresholds_come_close_to_every_score():
    generator = torch.Generator().manual_seed(1)
    labels, predictions = (
        torch.randint(0, 2, (500,), generator=generator),
        torch.rand(500, generator=generator),
    )
    value = AUCMetric(10_000)(labels, predictions)
    assert float(value) == pytest.approx(float(classification.binary_auroc(predictions, labels)), abs=1e-4)


def test_perplexity():
    generator = torch.Generator().manual_seed(2)
    each, summed = PerplexityMetric(), PerplexityMetric()
    all_logits, all_labels = [], []
    for size in (3, 5):
        logits = torch.randn(size, 7, 11, generator=generator)
        labels = torch.randint(0, 11, (size, 7), generator=generator)
        mask = torch.randint(0, 2, (size, 7), generator=generator)
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        each(labels, losses, weights=mask)
        summed(labels=labels, loss=(losses * mask).sum(), weights=mask)
        all_logits.append(logits)
        all_labels.append(labels.masked_fill(mask == 0, -100).flatten())
    logits = torch.cat([part.flatten(0, 1) for part in all_logits])[None]
    expected = oracle.text.perplexity(logits, torch.cat(all_labels)[None], ignore_index=-100)
    assert float(each.compute()) == pytest.approx(float(expected), rel=1e-6)
    assert float(summed.compute()) == pytest.approx(float(expected), rel=1e-6)


def test_mean_of_numbers_and_of_tensors():
    metric = MeanMetric()
    metric(2.0)
    metric(torch.tensor([1.0, 5.0, float("nan")]), weights=torch.tensor([3.0, 1.0, 0.0]))
    assert float(metric.compute()) == (2 + 3 + 5) / 5


@pytest.mark.parametrize("k", [1, 2, 9])
def test_precision_and_recall_at_k(k):
    generator = torch.Generator().manual_seed(3)
    predictions = torch.randn(20, 6, generator=generator)
    labels = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(20)])
    labels[::3, 1] = -1
    weights = torch.randint(0, 3, (20,), generator=generator)
    top = [set(row.topk(min(k, 6)).indices.tolist()) for row in predictions]
    right = [set(row.tolist()) - {-1} for row in labels]
    hits = sum(w * len(t & r) for w, t, r in zip(weights.tolist(), top, right, strict=True))
    there = sum(w * len(r) for w, r in zip(weights.tolist(), right, strict=True))
    precision = PrecisionAtKMetric(k)(labels, predictions, weights)
    recall = RecallAtKMetric(k)(labels=labels, predictions=predictions, weights=weights)
    assert float(precision) == pytest.approx(hits / (k * int(weights.sum())), rel=1e-6)
    assert float(recall) == pytest.approx(hits / there, rel=1e-6)


def test_recall_at_k_of_single_labels_is_top_k_accuracy():
    generator = torch.Generator().manual_seed(4)
    predictions, labels = torch.randn(30, 6, generator=generator), torch.arange(30) % 6
    expected = classification.multiclass_accuracy(predictions, labels, 6, average="micro", top_k=2)
    assert float(RecallAtKMetric(2)(labels, predictions)) == pytest.approx(float(expected), rel=1e-6)


def test_masked_values_are_ignored():
    labels, mask = torch.tensor([1, -100, 0]), torch.tensor([1, 0, 1])
    assert float(MeanIOUMetric(2)(labels, torch.tensor([1, 7, 0]), mask)) == 1
    assert float(AUCMetric()(labels, torch.tensor([0.9, float("nan"), 0.1]), mask)) == 1
    losses = torch.tensor([0.0, float("inf"), 0.0])
    assert float(PerplexityMetric()(labels, losses, mask)) == 1


def test_a_metric_in_a_loop():
    metric = AccuracyMetric(name="eval/accuracy")
    assert metric.name == "eval/accuracy" and AccuracyMetric().name == "AccuracyMetric"
    right, wrong = torch.tensor([1, 2]), torch.tensor([0, 0])
    assert float(metric(right, right)) == 1
    assert float(metric(right, wrong)) == 0.5, "a call returns the value over all batches so far"
    metric.reset()
    assert metric.num_updates == 0
    value = metric(right, wrong, dtype=torch.bfloat16)
    assert float(value) == 0 and value.dtype == torch.bfloat16


def test_states_go_into_a_state_dict_where_that_is_asked_for():
    first, second = MeanMetric(), MeanMetric()
    assert first.state_dict() == {}
    first.persistent(True)
    second.persistent(True)
    first(3.0)
    second.load_state_dict(first.state_dict())
    second(5.0)
    assert float(second.compute()) == 4


def test_a_metric_of_the_users_own():
    class Largest(Metric):
        def __init__(self, start, name=None):
            self.start = start
            super().__init__(name)

        def reset(self):
            super().reset()
            self.register_state("largest", torch.tensor(self.start), persistent=True)

        def update(self, values):
            self.largest = torch.maximum(self.largest, values.max())

        def compute(self):
            return self.largest

    metric = Largest(0.5)
    assert float(metric(torch.tensor([2.0, 1.0]))) == 2
    metric.reset()
    assert metric.num_updates == 0
    assert float(metric(torch.tensor([0.1]))) == 0.5
    assert list(metric.state_dict()) == ["largest"]


ONES = torch.ones(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AccuracyMetric()(ONES, ONES[:2]), r"predictions of shape \[3\], like the labels; got \[2\]"),
        (
            lambda: AccuracyMetric()(ONES, ONES, ONES[:, None]),
            r"weights of shape \[3\], like the labels; got \[3, 1\]",
        ),
        (lambda: PerplexityMetric()(ONES, torch.ones(2)), "expected losses of shape"),
        (lambda: MeanIOUMetric(1)(ONES, ONES), r"classes in range\(1\), got classes from 1 to 1"),
        (
            lambda: AUCMetric()(ONES, 2.0 * ONES),
            r"scores in \[0, 1\], got labels from 1 to 1 and scores from 2 to 2",
        ),
        (lambda: AUCMetric()(2 * ONES, 0.5 * ONES), "got labels from 2 to 2 and scores from 0.5 to 0.5"),
        (lambda: RecallAtKMetric(2)(ONES, torch.ones(2, 4)), r"got shapes \[3, 1\] and \[2, 4\]"),
    ],
)
def test_mismatched_shapes_and_values_are_errors(call, message):
    with pytest.raises(DataError, match=message):
        call()


@pytest.mark.parametrize(
    "make",
    [
        lambda: PrecisionAtKMetric(0),
        lambda: MeanIOUMetric(0),
        lambda: FBetaScoreMetric(2, beta=0.0),
        lambda: FBetaScoreMetric(2, average_type="weighted"),
        lambda: AUCMetric(1),
        lambda: AUCMetric(curve="roc"),
    ],
)
def test_arguments_out_of_range_are_errors(make):
    with pytest.raises(ConfigError, match=r"expected .* got "):
        make()


def test_an_error_without_torchmetrics_names_the_package_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("headwater.metrics")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(ConfigError, match=r"pip install 'headwater\[metrics\]'"):
        importlib.import_module("headwater.metrics")
