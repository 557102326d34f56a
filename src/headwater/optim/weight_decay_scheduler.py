"""Weight-decay schedulers, which set the `weight_decay` of an optimizer's parameter groups.

They work as those in `lr_scheduler`; `WeightDecayScheduler.names` has the names of the arguments. They do not
change groups without weight decay: `configure_param_groups` marks those of biases and normalization layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from headwater.optim import schedules
from headwater.optim.scheduler import (
    ChainedScheduler,
    ScalePerParamScheduler,
    Scheduler,
    SequentialScheduler,
)


class WeightDecayScheduler(Scheduler):
    """Base class of the weight-decay schedulers."""

    option = "weight_decay"
    names: ClassVar[Mapping[str, str]] = {
        "level": "val",
        "levels": "vals",
        "initial": "initial_val",
        "end": "end_val",
        "lower": "base_val",
        "upper": "max_val",
        "peak": "max_val",
        "factor": "wd_lambda",
    }


class ConstantWD(WeightDecayScheduler):
    """The same weight decay at every step."""

    schedule_class = schedules.Constant


class LinearWD(WeightDecayScheduler):
    """Linear interpolation from one weight decay to another."""

    schedule_class = schedules.Linear


class PolynomialWD(WeightDecayScheduler):
    """Decay by a power of the remaining fraction of steps."""

    schedule_class = schedules.Polynomial


class CosineDecayWD(WeightDecayScheduler):
    """Half a cosine from one weight decay to another."""

    schedule_class = schedules.CosineDecay


class CosineAnnealingWD(WeightDecayScheduler):
    """A periodic cosine between two weight decays."""

    schedule_class = schedules.CosineAnnealing


class CosineAnnealingWarmRestartsWD(WeightDecayScheduler):
    """Half a cosine, restarted at the end of each period."""

    schedule_class = schedules.CosineAnnealingWarmRestarts


class ExponentialWD(WeightDecayScheduler):
    """Exponential decay by a constant factor per `total_iters` steps."""

    schedule_class = schedules.Exponential


class InverseExponentialTimeDecayWD(WeightDecayScheduler):
    """Decay as 1 / (1 + rate · a power of the step)."""

    schedule_class = schedules.InverseExponentialTimeDecay


class InverseSquareRootDecayWD(WeightDecayScheduler):
    """Decay with the inverse square root of the step, after a constant value for `warmup_steps` steps."""

    schedule_class = schedules.InverseSquareRootDecay


class StepWD(WeightDecayScheduler):
    """Multiplication by a constant factor every `step_size` steps."""

    schedule_class = schedules.Step


class MultiStepWD(WeightDecayScheduler):
    """Multiplication by a constant factor at each milestone."""

    schedule_class = schedules.MultiStep


class PiecewiseConstantWD(WeightDecayScheduler):
    """A constant weight decay in each interval between milestones."""

    schedule_class = schedules.PiecewiseConstant


class LambdaWD(WeightDecayScheduler):
    """The initial weight decay times a function of the step."""

    schedule_class = schedules.Lambda


class MultiplicativeWD(WeightDecayScheduler):
    """Multiplication by a constant factor at every step."""

    schedule_class = schedules.Multiplicative


class CyclicWD(WeightDecayScheduler):
    """A weight decay that rises and falls linearly between two values, again and again."""

    schedule_class = schedules.Cyclic


class OneCycleWD(WeightDecayScheduler):
    """A weight decay that rises once to a maximum, and then falls to almost 0 (the one-cycle policy)."""

    schedule_class = schedules.OneCycle


class SequentialWD(SequentialScheduler, WeightDecayScheduler):
    """A sequence of weight-decay schedulers, each active until the next one starts."""


class ChainedWD(ChainedScheduler, WeightDecayScheduler):
    """A weight decay that is the product of several schedulers."""


class ScalePerParamWD(ScalePerParamScheduler, WeightDecayScheduler):
    """A scheduler whose value is multiplied by a factor of each parameter group."""
