"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Protocol


class Schedule(Protocol):
    """A value that depends on the optimizer step, which counts from 0."""

    def value(self, step: int) -> float:
        """The value at `step` >= 0."""
        ...


@dataclasses.dataclass(frozen=True)
class Constant:
    """`learning_rate` at every step."""

    learning_rate: float

    def value(self, step: int) -> float:
        return self.learning_rate


@dataclasses.dataclass(frozen=True)
class Linear:
    """A straight line from `initial` to `end` over `total_iters` steps, then `end`.

    `initial + (end - initial) * min(step, total_iters) / total_iters`, as `torch.optim.lr_scheduler.LinearLR`
    with start and end factors, and `LinearLR` of cerebras.pytorch.
    """

    initial: float
    end: float
    total_iters: int

    def value(self, step: int) -> float:
        progress = _progress(step, self.total_iters)
        return self.initial * (1 - progress) + self.end * progress


@dataclasses.dataclass(frozen=True)
class CosineDecay:
    """Half a cosine from `initial` to `end` over `total_iters` steps, then `end`.

    `end + (initial - end) * (1 + cos(pi * min(step, total_iters) / total_iters)) / 2`: SGDR without restarts
    (Loshchilov and Hutter, arXiv:1608.03983, equation 5), as `torch.optim.lr_scheduler.CosineAnnealingLR`
    within its first period, and `CosineDecayLR` of cerebras.pytorch.
    """

    initial: float
    end: float
    total_iters: int

    def value(self, step: int) -> float:
        weight = (1 + math.cos(math.pi * _progress(step, self.total_iters))) / 2
        return self.end + (self.initial - self.end) * weight


@dataclasses.dataclass(frozen=True)
class Sequential:
    """One schedule after another: the next takes over, from its own step 0, at each milestone.

    As `torch.optim.lr_scheduler.SequentialLR` and `SequentialLR` of cerebras.pytorch.

    Attributes:
        schedules: at least one.
        milestones: the steps at which the second, third, … takes over; increasing, one fewer than schedules.
    """

    schedules: tuple[Schedule, ...]
    milestones: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.milestones) == len(self.schedules) - 1, "one milestone between two schedules"
        assert all(a <= b for a, b in itertools.pairwise((0, *self.milestones))), "milestones in order"

    def value(self, step: int) -> float:
        index = sum(step >= milestone for milestone in self.milestones)
        start = self.milestones[index - 1] if index else 0
        return self.schedules[index].value(step - start)


def _progress(step: int, total_iters: int) -> float:
    return 1.0 if step >= total_iters else step / total_iters
