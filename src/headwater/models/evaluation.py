"""What a model counts while it is evaluated."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from headwater.core.scores import f_beta, intersection_over_union


class Scored:
    """The share of answers that were right, over the batches since the last reset.

    Args:
        name: under which it is reported.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.update_count = 0
        self._right = self._all = 0

    def add(self, right: Tensor, counted: Tensor | None = None) -> None:
        """Count a batch.

        Args:
            right: which answers were right, of any shape.
            counted: which answers count, of the same shape; all if not given.
        """
        if _is_dry_run(right):
            return
        counted = torch.ones_like(right) if counted is None else counted
        self.update_count += 1
        self._right += int((right & counted).sum())
        self._all += int(counted.sum())

    def reset(self) -> None:
        """Begin anew."""
        self.update_count, self._right, self._all = 0, 0, 0

    def compute(self) -> float:
        """The share; 0 where nothing counted."""
        return self._right / self._all if self._all else 0.0


class F1:
    """How well the few that are not of class 0 are found, over the batches since the last reset.

    The harmonic mean of two shares: of what was found that was right, and of what is there that was found.

    Args:
        name: under which it is reported.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.update_count = 0
        self._right = self._found = self._there = 0

    def add(self, found: Tensor, labels: Tensor, counted: Tensor) -> None:
        """Count a batch.

        Args:
            found: the answers, integers of any shape.
            labels: the right ones, of the same shape.
            counted: which answers count, of the same shape.
        """
        if _is_dry_run(found):
            return
        self.update_count += 1
        self._right += int(((found == labels) & (labels != 0) & counted).sum())
        self._found += int(((found != 0) & counted).sum())
        self._there += int(((labels != 0) & counted).sum())

    def reset(self) -> None:
        """Begin anew."""
        self.update_count = self._right = self._found = self._there = 0

    def compute(self) -> float:
        """The mean; 0 where nothing was found."""
        return f_beta(self._right, self._there, self._found) if self._right else 0.0


class Overlap:
    """How well the pixels of each class are found, over the batches since the last reset.

    The mean over the classes that occur in labels or answers, of intersection over union, or of Dice's
    coefficient: twice the intersection over the sum of the sizes.

    Args:
        name: under which it is reported.
        num_classes: labels and answers lie in `range(num_classes)`.
        dice: Dice's coefficient.
    """

    def __init__(self, name: str, num_classes: int, *, dice: bool = False) -> None:
        self.name = name
        self.num_classes = num_classes
        self.score = f_beta if dice else intersection_over_union
        self.reset()

    def add(self, found: Tensor, labels: Tensor) -> None:
        """Count a batch.

        Args:
            found: the answers, integers of any shape.
            labels: the right ones, of the same shape.
        """
        if _is_dry_run(found):
            return
        self.update_count += 1
        for number in range(self.num_classes):
            ours, theirs = found == number, labels == number
            for place, counted in enumerate((ours & theirs, theirs, ours)):
                self._counts[number][place] += int(counted.sum())

    def reset(self) -> None:
        """Begin anew."""
        self.update_count = 0
        self._counts = [[0, 0, 0] for _ in range(self.num_classes)]

    def compute(self) -> float:
        """The mean; 0 where nothing was counted."""
        shares = [self.score(*counts) for counts in self._counts if any(counts)]
        return sum(shares) / len(shares) if shares else 0.0


def _is_dry_run(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)
