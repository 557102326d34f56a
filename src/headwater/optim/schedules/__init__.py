"""Schedules of a learning rate or a weight decay, as pure functions of the step.

Each formula is implemented only here. `lr_scheduler` and `weight_decay_scheduler` write the values to an
optimizer; a run from a params file reads them directly. The types of the fields define the valid values.
"""

from headwater.optim.schedules.base import Schedule
from headwater.optim.schedules.combined import Chained, Sequential
from headwater.optim.schedules.decay import (
    Constant,
    CosineDecay,
    Exponential,
    InverseExponentialTimeDecay,
    InverseSquareRootDecay,
    Lambda,
    Linear,
    Multiplicative,
    MultiStep,
    PiecewiseConstant,
    Polynomial,
    Step,
)
from headwater.optim.schedules.periodic import (
    CosineAnnealing,
    CosineAnnealingWarmRestarts,
    Cyclic,
    OneCycle,
)

__all__ = [
    "Chained",
    "Constant",
    "CosineAnnealing",
    "CosineAnnealingWarmRestarts",
    "CosineDecay",
    "Cyclic",
    "Exponential",
    "InverseExponentialTimeDecay",
    "InverseSquareRootDecay",
    "Lambda",
    "Linear",
    "MultiStep",
    "Multiplicative",
    "OneCycle",
    "PiecewiseConstant",
    "Polynomial",
    "Schedule",
    "Sequential",
    "Step",
]
