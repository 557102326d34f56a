"""Metrics of models in evaluations, compared with counts by hand and with torchmetrics."""

import pytest
import torch

from headwater.models.evaluation import F1, Accuracy, Overlap

torchmetrics = pytest.importorskip("torchmetrics")


def test_accuracy_counts_only_valid_entries():
    scored = Accuracy("accuracy")
    assert scored.compute() == 0
    scored.add(torch.tensor([True, False, True]))
    scored.add(torch.tensor([True, True]), torch.tensor([True, False]))
    assert (scored.compute(), scored.update_count) == (3 / 4, 2)
    scored.add(torch.empty(5, dtype=torch.bool, device="meta"))
    assert scored.update_count == 2, "a dry run does not count"
    scored.reset()
    assert (scored.compute(), scored.update_count) == (0, 0)


def batches(classes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(classes, (2, 4, 5), generator=generator).unbind() for _ in range(3)]


def test_f1_of_all_classes_but_the_first():
    ours = F1("f1")
    right = found = there = 0
    for predicted, labels in batches(4):
        ours.add(predicted, labels, torch.ones_like(labels, dtype=torch.bool))
        right += int(((predicted == labels) & (labels > 0)).sum())
        found, there = found + int((predicted > 0).sum()), there + int((labels > 0).sum())
    assert ours.compute() == pytest.approx(2 * right / (found + there))


@pytest.mark.parametrize("dice", [False, True])
def test_overlap_is_the_mean_of_the_classes_that_occur(dice):
    ours = Overlap("overlap", 4, dice=dice)
    kind = torchmetrics.F1Score if dice else torchmetrics.JaccardIndex
    theirs = kind("multiclass", num_classes=3, average="macro")
    for predicted, labels in batches(3):  # class 3 never occurs
        ours.add(predicted, labels)
        theirs.update(predicted, labels)
    assert ours.compute() == pytest.approx(float(theirs.compute()))
    ours.reset()
    assert ours.compute() == 0
