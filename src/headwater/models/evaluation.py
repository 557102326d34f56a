"""What a model counts while it is evaluated."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


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
        if right.is_meta or isinstance(right, FakeTensor):
            return  # a dry run
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
