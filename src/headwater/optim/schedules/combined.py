"""Schedules made of other schedules: sequences and products."""

from __future__ import annotations

import dataclasses
import itertools
import math

from headwater.core.errors import ConfigError
from headwater.optim.schedules.base import Schedule, check_milestones, passed


@dataclasses.dataclass(frozen=True)
class Sequential(Schedule):
    """A sequence of schedules. At each milestone the next one starts, at its step 0.

    The same as `torch.optim.lr_scheduler.SequentialLR`.

    Attributes:
        schedules: at least one.
        milestones: the steps at which the second, third, … schedule starts; ascending, one fewer than
            schedules.
    """

    schedules: tuple[Schedule, ...]
    milestones: tuple[int, ...]

    def __post_init__(self) -> None:
        check_milestones(self.milestones, parts=len(self.schedules))

    @classmethod
    def of(cls, schedules: tuple[Schedule, ...]) -> Sequential:
        """Construct a sequence in which each schedule starts where the one before it ends.

        Raises:
            ConfigError: if a schedule before the last has no end.
        """
        lengths = []
        for schedule in schedules[:-1]:
            if schedule.length is None:
                raise ConfigError(
                    f"{type(schedule).__name__} has no end, so the next schedule would never start",
                    remedy="add total_iters to it, or milestones to the sequence",
                )
            lengths.append(schedule.length)
        return cls(schedules, tuple(itertools.accumulate(lengths)))

    def value(self, step: int) -> float:
        index = passed(self.milestones, step)
        start = self.milestones[index - 1] if index else 0
        return self.schedules[index].value(step - start)

    @property
    def length(self) -> int | None:
        last = self.schedules[-1].length
        return None if last is None else last + (self.milestones[-1] if self.milestones else 0)


@dataclasses.dataclass(frozen=True)
class Chained(Schedule):
    """A product: the first schedule, times each other schedule's value relative to its value at step 0.

    The same as `torch.optim.lr_scheduler.ChainedScheduler`.

    Attributes:
        schedules: at least one; only the first may start at 0.
    """

    schedules: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        if not self.schedules:
            raise ConfigError("expected at least one schedule in a chain, got 0", remedy="add a schedule")
        for schedule in self.schedules[1:]:
            if schedule.value(0) == 0:
                raise ConfigError(
                    f"{type(schedule).__name__} starts at 0, so it can only be the first schedule of a chain",
                    remedy="put it first, or let it start above 0",
                )

    def value(self, step: int) -> float:
        factors = (schedule.value(step) / schedule.value(0) for schedule in self.schedules[1:])
        return math.prod(factors, start=self.schedules[0].value(step))
