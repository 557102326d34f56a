"""Metrics that models update while they are evaluated."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from headwater.core.scores import f_beta, intersection_over_union


class Accuracy:
    """Accuracy: the fraction of right predictions in all batches since the last reset.

    Args:
        name: name in reports.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.update_count = 0
        self._right = self._all = 0

    def add(self, right: Tensor, counted: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            right: True for a right prediction, of any shape.
            counted: True for a prediction that counts, of the same shape; by default all.
        """
        if _is_dry_run(right):
            return
        counted = torch.ones_like(right) if counted is None else counted
        self.update_count += 1
        self._right += int((right & counted).sum())
        self._all += int(counted.sum())

    def reset(self) -> None:
        """Forget all batches."""
        self.update_count, self._right, self._all = 0, 0, 0

    def compute(self) -> float:
        """Return the accuracy; 0 if no prediction counts."""
        return self._right / self._all if self._all else 0.0


class F1:
    """F1 score of all classes except class 0, in all batches since the last reset.

    It is the harmonic mean of precision and recall.

    Args:
        name: name in reports.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.update_count = 0
        self._right = self._found = self._there = 0

    def add(self, found: Tensor, labels: Tensor, counted: Tensor) -> None:
        """Add a batch.

        Args:
            found: predicted classes, integers of any shape.
            labels: right classes, of the same shape.
            counted: True for a prediction that counts, of the same shape.
        """
        if _is_dry_run(found):
            return
        self.update_count += 1
        self._right += int(((found == labels) & (labels != 0) & counted).sum())
        self._found += int(((found != 0) & counted).sum())
        self._there += int(((labels != 0) & counted).sum())

    def reset(self) -> None:
        """Forget all batches."""
        self.update_count = self._right = self._found = self._there = 0

    def compute(self) -> float:
        """Return the F1 score; 0 if no prediction was right."""
        return f_beta(self._right, self._there, self._found) if self._right else 0.0


class Overlap:
    """Mean intersection over union, or mean Dice coefficient, in all batches since the last reset.

    It is the mean over the classes that occur in labels or predictions. The Dice coefficient is twice the
    intersection over the sum of the sizes.

    Args:
        name: name in reports.
        num_classes: number of classes; labels and predictions are in `range(num_classes)`.
        dice: compute the Dice coefficient instead of intersection over union.
    """

    def __init__(self, name: str, num_classes: int, *, dice: bool = False) -> None:
        self.name = name
        self.num_classes = num_classes
        self.score = f_beta if dice else intersection_over_union
        self.reset()

    def add(self, found: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            found: predicted classes, integers of any shape.
            labels: right classes, of the same shape.
        """
        if _is_dry_run(found):
            return
        self.update_count += 1
        sums = []
        for number in range(self.num_classes):
            ours, theirs = found == number, labels == number
            sums.append(torch.stack([counted.sum() for counted in (ours & theirs, theirs, ours)]))
        # One transfer for all classes: each would wait for the device.
        for counts, more in zip(self._counts, torch.stack(sums).tolist(), strict=True):
            counts[:] = [old + new for old, new in zip(counts, more, strict=True)]

    def reset(self) -> None:
        """Forget all batches."""
        self.update_count = 0
        self._counts = [[0, 0, 0] for _ in range(self.num_classes)]

    def compute(self) -> float:
        """Return the mean; 0 if no pixel was added."""
        shares = [self.score(*counts) for counts in self._counts if any(counts)]
        return sum(shares) / len(shares) if shares else 0.0


def _is_dry_run(tensor: Tensor) -> bool:
    # Such tensors have no values to count.
    return tensor.is_meta or isinstance(tensor, FakeTensor)
