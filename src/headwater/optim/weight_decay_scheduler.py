"""Weight-decay schedulers: schedules that are written to the `weight_decay` of an optimizer's groups.

As `lr_scheduler`, with the names of the arguments in `WeightDecayScheduler.names`. Groups that must not decay
(`configure_param_groups` marks those of biases and norms) are left alone.
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
    """Base of the weight-decay schedulers."""

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
    """A straight line from one weight decay to another."""

    schedule_class = schedules.Linear


class PolynomialWD(WeightDecayScheduler):
    """A power of the steps that are left."""

    schedule_class = schedules.Polynomial


class CosineDecayWD(WeightDecayScheduler):
    """Half a cosine from one weight decay to another."""

    schedule_class = schedules.CosineDecay


class CosineAnnealingWD(WeightDecayScheduler):
    """A cosine without end."""

    schedule_class = schedules.CosineAnnealing


class CosineAnnealingWarmRestartsWD(WeightDecayScheduler):
    """Half a cosine, again and again."""

    schedule_class = schedules.CosineAnnealingWarmRestarts


class ExponentialWD(WeightDecayScheduler):
    """A constant factor every `total_iters` steps."""

    schedule_class = schedules.Exponential


class InverseExponentialTimeDecayWD(WeightDecayScheduler):
    """Falls with the inverse of a power of the step."""

    schedule_class = schedules.InverseExponentialTimeDecay


class InverseSquareRootDecayWD(WeightDecayScheduler):
    """Falls with the square root of the step, constant until `warmup_steps`."""

    schedule_class = schedules.InverseSquareRootDecay


class StepWD(WeightDecayScheduler):
    """A constant factor at every multiple of `step_size`."""

    schedule_class = schedules.Step


class MultiStepWD(WeightDecayScheduler):
    """A constant factor at each milestone."""

    schedule_class = schedules.MultiStep


class PiecewiseConstantWD(WeightDecayScheduler):
    """Another weight decay from each milestone on."""

    schedule_class = schedules.PiecewiseConstant


class LambdaWD(WeightDecayScheduler):
    """A function of the step times the initial weight decay."""

    schedule_class = schedules.Lambda


class MultiplicativeWD(WeightDecayScheduler):
    """A constant factor at every step."""

    schedule_class = schedules.Multiplicative


class CyclicWD(WeightDecayScheduler):
    """A triangle wave."""

    schedule_class = schedules.Cyclic


class OneCycleWD(WeightDecayScheduler):
    """Up once, and down to almost nothing."""

    schedule_class = schedules.OneCycle


class SequentialWD(SequentialScheduler, WeightDecayScheduler):
    """One scheduler after another."""


class ChainedWD(ChainedScheduler, WeightDecayScheduler):
    """Several schedulers at once, multiplied."""


class ScalePerParamWD(ScalePerParamScheduler, WeightDecayScheduler):
    """Another scheduler, times the parameter group's own factor."""
