"""Schedules that move from one value to another, or decay without end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from headwater.optim.schedules.base import Period, Rate, Schedule, Steps, check_milestones, cosine, passed


@dataclasses.dataclass(frozen=True)
class Constant(Schedule):
    """`level` at every step; `total_iters` is only the length in a sequence."""

    level: Rate
    total_iters: Steps | None = None

    def value(self, step: int) -> float:
        return self.level

    @property
    def length(self) -> int | None:
        return self.total_iters


@dataclasses.dataclass(frozen=True)
class Linear(Schedule):
    """Linear interpolation from `initial` to `end` over `total_iters` steps, then `end`.

    The same as `torch.optim.lr_scheduler.LinearLR` with start and end factors.

    Attributes:
        cycle: see `Polynomial`.
    """

    initial: Rate
    end: Rate
    total_iters: Steps
    cycle: bool = False

    def value(self, step: int) -> float:
        progress = _progress(step, self.total_iters, self.cycle)
        # In this form the last value is exactly `end`, without a rounding error.
        return self.initial * (1 - progress) + self.end * progress

    @property
    def length(self) -> int:
        return self.total_iters


@dataclasses.dataclass(frozen=True)
class Polynomial(Schedule):
    """`end + (initial - end) * (1 - step / total_iters) ** power` for `total_iters` steps, then `end`.

    The same as `torch.optim.lr_scheduler.PolynomialLR` if `end` is 0.

    Attributes:
        cycle: true to restart instead of staying at `end`. After n · `total_iters` steps the value jumps to
            that of a decay over (n + 1) · `total_iters` steps, and falls to `end` again, as in
            `tf.keras.optimizers.schedules.PolynomialDecay`.
    """

    initial: Rate
    end: Rate
    total_iters: Steps
    power: Rate = 1.0
    cycle: bool = False

    def value(self, step: int) -> float:
        progress = _progress(step, self.total_iters, self.cycle)
        if progress == 1:  # with power 0 the formula would return `initial`
            return self.end
        return self.end + (self.initial - self.end) * math.pow(1 - progress, self.power)

    @property
    def length(self) -> int:
        return self.total_iters


@dataclasses.dataclass(frozen=True)
class CosineDecay(Schedule):
    """Half a cosine from `initial` to `end` over `total_iters` steps, then `end`.

    The same as the first half period of `torch.optim.lr_scheduler.CosineAnnealingLR`.
    """

    initial: Rate
    end: Rate
    total_iters: Steps

    def value(self, step: int) -> float:
        return cosine(self.initial, self.end, _progress(step, self.total_iters))

    @property
    def length(self) -> int:
        return self.total_iters


@dataclasses.dataclass(frozen=True)
class Exponential(Schedule):
    """`initial * decay_rate ** (step / total_iters)`; with `staircase` the quotient is rounded down.

    The same as `torch.optim.lr_scheduler.ExponentialLR` if `total_iters` is 1.
    """

    initial: Rate
    total_iters: Period
    decay_rate: Rate
    staircase: bool = False

    def value(self, step: int) -> float:
        return self.initial * math.pow(self.decay_rate, _quotient(step, self.total_iters, self.staircase))

    @property
    def length(self) -> int:
        return self.total_iters


@dataclasses.dataclass(frozen=True)
class InverseExponentialTimeDecay(Schedule):
    """`initial / (1 + decay_rate * q)`, where `q` is `step ** step_exponent / total_iters`.

    With `staircase` q is rounded down. With exponent 1 the same as
    `tf.keras.optimizers.schedules.InverseTimeDecay`.
    """

    initial: Rate
    step_exponent: Rate
    total_iters: Period
    decay_rate: Rate
    staircase: bool = False

    def value(self, step: int) -> float:
        elapsed = _quotient(step**self.step_exponent, self.total_iters, self.staircase)
        return self.initial / (1 + self.decay_rate * elapsed)

    @property
    def length(self) -> int:
        return self.total_iters


@dataclasses.dataclass(frozen=True)
class InverseSquareRootDecay(Schedule):
    """`initial * scale / sqrt(max(step, warmup_steps))`, as for T5 (arXiv:1910.10683, section 3.1.2)."""

    initial: Rate = 1.0
    scale: Rate = 1.0
    warmup_steps: Period = 1

    def value(self, step: int) -> float:
        return self.initial * self.scale / math.sqrt(max(step, self.warmup_steps))


@dataclasses.dataclass(frozen=True)
class Step(Schedule):
    """`initial`, multiplied by `gamma` every `step_size` steps, as `torch.optim.lr_scheduler.StepLR`."""

    initial: Rate
    step_size: Period
    gamma: Rate

    def value(self, step: int) -> float:
        return self.initial * self.gamma ** (step // self.step_size)


@dataclasses.dataclass(frozen=True)
class MultiStep(Schedule):
    """`initial`, multiplied by `gamma` at each milestone, as `torch.optim.lr_scheduler.MultiStepLR`."""

    initial: Rate
    gamma: Rate
    milestones: tuple[Steps, ...]

    def __post_init__(self) -> None:
        check_milestones(self.milestones)

    def value(self, step: int) -> float:
        return self.initial * self.gamma ** passed(self.milestones, step)


@dataclasses.dataclass(frozen=True)
class PiecewiseConstant(Schedule):
    """`levels[0]` before the first milestone, `levels[1]` from there to the second, and so on.

    Attributes:
        levels: values, one more than milestones.
        milestones: the steps at which the second, third, … level starts; ascending.
    """

    levels: tuple[Rate, ...]
    milestones: tuple[Steps, ...]

    def __post_init__(self) -> None:
        check_milestones(self.milestones, parts=len(self.levels))

    def value(self, step: int) -> float:
        return self.levels[passed(self.milestones, step)]


@dataclasses.dataclass(frozen=True)
class Lambda(Schedule):
    """`initial * factor(step)`, as `torch.optim.lr_scheduler.LambdaLR`."""

    initial: Rate
    factor: Callable[[int], float]

    def value(self, step: int) -> float:
        return self.initial * self.factor(step)


@dataclasses.dataclass(frozen=True)
class Multiplicative(Schedule):
    """`initial * coefficient ** step`: `torch.optim.lr_scheduler.MultiplicativeLR` with a constant factor."""

    initial: Rate
    coefficient: Rate

    def value(self, step: int) -> float:
        return self.initial * self.coefficient**step


def _progress(step: int, total_iters: int, cycle: bool = False) -> float:
    """Return the finished fraction of the decay, 0 to 1."""
    if total_iters == 0:
        return 1.0
    # Rounded up: at the end of a round the value is `end`, and only the next step jumps.
    rounds = -(-step // total_iters) if cycle else 1
    return min(1.0, step / (total_iters * max(1, rounds)))


def _quotient(numerator: float, denominator: int, staircase: bool) -> float:
    return numerator // denominator if staircase else numerator / denominator
