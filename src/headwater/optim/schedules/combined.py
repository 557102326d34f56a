"""Schedules made of schedules."""

from __future__ import annotations

import dataclasses
import itertools
import math

from headwater.core.errors import ConfigError
from headwater.optim.schedules.base import Schedule, check_milestones, passed


@dataclasses.dataclass(frozen=True)
class Sequential(Schedule):
    """One schedule after another: the next takes over, from its own step 0, at each milestone.

    As `torch.optim.lr_scheduler.SequentialLR`.

    Attributes:
        schedules: at least one.
        milestones: the steps at which the second, third, … takes over; increasing, one fewer than schedules.
    """

    schedules: tuple[Schedule, ...]
    milestones: tuple[int, ...]

    def __post_init__(self) -> None:
        check_milestones(self.milestones, parts=len(self.schedules))

    @classmethod
    def of(cls, schedules: tuple[Schedule, ...]) -> Sequential:
        """Let each schedule take over where the one before it ends.

        Raises:
            ConfigError: if one before the last has no end.
        """
        lengths = []
        for schedule in schedules[:-1]:
            if schedule.length is None:
                raise ConfigError(
                    f"{type(schedule).__name__} has no end at which the next schedule could take over",
                    remedy="give its total_iters, or milestones",
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
    """The first schedule, times what has become of each other one relative to its value at step 0.

    As `torch.optim.lr_scheduler.ChainedScheduler`.

    Attributes:
        schedules: at least one; only the first may begin at 0.
    """

    schedules: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        if not self.schedules:
            raise ConfigError("a chain of no schedules has no value", remedy="give at least one")
        for schedule in self.schedules[1:]:
            if schedule.value(0) == 0:
                raise ConfigError(
                    f"a chain multiplies, and {type(schedule).__name__} begins at 0",
                    remedy="put it first, or let it begin above 0",
                )

    def value(self, step: int) -> float:
        factors = (schedule.value(step) / schedule.value(0) for schedule in self.schedules[1:])
        return math.prod(factors, start=self.schedules[0].value(step))
