"""Learning-rate schedulers, which set the `lr` of an optimizer's parameter groups.

Call `step()` once after each step of the optimizer. The arguments after the optimizer are the fields of the
schedule of the same name in `headwater.optim.schedules`, which has the formula. `LRScheduler.names` maps the
fields to the names of the arguments.
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


# `Scheduler` is first, so that its methods replace torch's of the same names.
class LRScheduler(Scheduler, torch.optim.lr_scheduler.LRScheduler):
    """Base class of the learning-rate schedulers.

    It derives from torch's `LRScheduler`, because some libraries check the type. torch's constructor is not
    called, because it would take the initial rates from the optimizer.
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
        """Return the current learning rate of every parameter group."""
        return list(self.get_last_value())

    get_lr = get_last_lr


class ConstantLR(LRScheduler):
    """The same learning rate at every step."""

    schedule_class = schedules.Constant


class LinearLR(LRScheduler):
    """Linear interpolation from one learning rate to another."""

    schedule_class = schedules.Linear


class PolynomialLR(LRScheduler):
    """Decay by a power of the remaining fraction of steps."""

    schedule_class = schedules.Polynomial


class CosineDecayLR(LRScheduler):
    """Half a cosine from one learning rate to another."""

    schedule_class = schedules.CosineDecay


class CosineAnnealingLR(LRScheduler):
    """A periodic cosine between two learning rates."""

    schedule_class = schedules.CosineAnnealing


class CosineAnnealingWarmRestartsLR(LRScheduler):
    """Half a cosine, restarted at the end of each period."""

    schedule_class = schedules.CosineAnnealingWarmRestarts


class ExponentialLR(LRScheduler):
    """Exponential decay by a constant factor per `total_iters` steps."""

    schedule_class = schedules.Exponential


class InverseExponentialTimeDecayLR(LRScheduler):
    """Decay as 1 / (1 + rate · a power of the step)."""

    schedule_class = schedules.InverseExponentialTimeDecay


class InverseSquareRootDecayLR(LRScheduler):
    """Decay with the inverse square root of the step, after a constant rate for `warmup_steps` steps."""

    schedule_class = schedules.InverseSquareRootDecay


class StepLR(LRScheduler):
    """Multiplication by a constant factor every `step_size` steps."""

    schedule_class = schedules.Step


class MultiStepLR(LRScheduler):
    """Multiplication by a constant factor at each milestone."""

    schedule_class = schedules.MultiStep


class PiecewiseConstantLR(LRScheduler):
    """A constant learning rate in each interval between milestones."""

    schedule_class = schedules.PiecewiseConstant


class LambdaLR(LRScheduler):
    """The initial learning rate times a function of the step."""

    schedule_class = schedules.Lambda


class MultiplicativeLR(LRScheduler):
    """Multiplication by a constant factor at every step."""

    schedule_class = schedules.Multiplicative


class CyclicLR(LRScheduler):
    """A learning rate that rises and falls linearly between two values, again and again."""

    schedule_class = schedules.Cyclic


class OneCycleLR(LRScheduler):
    """A learning rate that rises once to a maximum, and then falls to almost 0 (the one-cycle policy)."""

    schedule_class = schedules.OneCycle


class SequentialLR(SequentialScheduler, LRScheduler):
    """A sequence of learning-rate schedulers, each active until the next one starts."""


class ChainedLR(_Chained, LRScheduler):
    """A learning rate that is the product of several schedulers."""


class ScalePerParamLR(ScalePerParamScheduler, LRScheduler):
    """A scheduler whose value is multiplied by a factor of each parameter group."""


# The names of these two in torch.
CosineAnnealingWarmRestarts = CosineAnnealingWarmRestartsLR
ChainedScheduler = ChainedLR
