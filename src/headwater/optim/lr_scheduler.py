"""Learning-rate schedulers: schedules that are written to the `lr` of an optimizer's parameter groups.

Call `step()` once after each step of the optimizer. The arguments beside the optimizer are those of the
schedule of the same name in `headwater.optim.schedules`, where the formulas are; what a rate is called says
`LRScheduler.names`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from headwater.optim import schedules
from headwater.optim.scheduler import (
    ChainedScheduler as _Chained,
)
from headwater.optim.scheduler import (
    ScalePerParamScheduler,
    Scheduler,
    SequentialScheduler,
)


class LRScheduler(Scheduler, torch.optim.lr_scheduler.LRScheduler):
    """Base of the learning-rate schedulers.

    It is one of torch's too, for the libraries that ask; torch's constructor, which would take the initial
    rates from the optimizer, is not run.
    """

    option = "lr"
    names: ClassVar[Mapping[str, str]] = {
        "level": "learning_rate",
        "levels": "learning_rates",
        "initial": "initial_learning_rate",
        "end": "end_learning_rate",
        "lower": "base_lr",
        "upper": "max_lr",
        "peak": "max_lr",
        "factor": "lr_lambda",
    }

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """The learning rate of every parameter group, as it was last set."""
        return list(self.get_last_value())

    get_lr = get_last_lr


class ConstantLR(LRScheduler):
    """The same learning rate at every step."""

    schedule_class = schedules.Constant


class LinearLR(LRScheduler):
    """A straight line from one learning rate to another."""

    schedule_class = schedules.Linear


class PolynomialLR(LRScheduler):
    """A power of the steps that are left."""

    schedule_class = schedules.Polynomial


class CosineDecayLR(LRScheduler):
    """Half a cosine from one learning rate to another."""

    schedule_class = schedules.CosineDecay


class CosineAnnealingLR(LRScheduler):
    """A cosine without end."""

    schedule_class = schedules.CosineAnnealing


class CosineAnnealingWarmRestartsLR(LRScheduler):
    """Half a cosine, again and again."""

    schedule_class = schedules.CosineAnnealingWarmRestarts


class ExponentialLR(LRScheduler):
    """A constant factor every `total_iters` steps."""

    schedule_class = schedules.Exponential


class InverseExponentialTimeDecayLR(LRScheduler):
    """Falls with the inverse of a power of the step."""

    schedule_class = schedules.InverseExponentialTimeDecay


class InverseSquareRootDecayLR(LRScheduler):
    """Falls with the square root of the step, constant until `warmup_steps`."""

    schedule_class = schedules.InverseSquareRootDecay


class StepLR(LRScheduler):
    """A constant factor at every multiple of `step_size`."""

    schedule_class = schedules.Step


class MultiStepLR(LRScheduler):
    """A constant factor at each milestone."""

    schedule_class = schedules.MultiStep


class PiecewiseConstantLR(LRScheduler):
    """Another learning rate from each milestone on."""

    schedule_class = schedules.PiecewiseConstant


class LambdaLR(LRScheduler):
    """A function of the step times the initial learning rate."""

    schedule_class = schedules.Lambda


class MultiplicativeLR(LRScheduler):
    """A constant factor at every step."""

    schedule_class = schedules.Multiplicative


class CyclicLR(LRScheduler):
    """A triangle wave."""

    schedule_class = schedules.Cyclic


class OneCycleLR(LRScheduler):
    """Up once, and down to almost nothing."""

    schedule_class = schedules.OneCycle


class SequentialLR(SequentialScheduler, LRScheduler):
    """One scheduler after another."""


class ChainedLR(_Chained, LRScheduler):
    """Several schedulers at once, multiplied."""


class ScalePerParamLR(ScalePerParamScheduler, LRScheduler):
    """Another scheduler, times the parameter group's own factor."""


CosineAnnealingWarmRestarts = CosineAnnealingWarmRestartsLR
ChainedScheduler = ChainedLR
