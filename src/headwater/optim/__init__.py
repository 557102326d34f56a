"""Optimizers and schedules."""

from headwater.optim.schedules import Constant, CosineDecay, Linear, Schedule, Sequential
from headwater.optim.spec import OptimizerSpec, is_bias_or_norm, is_elementwise

__all__ = [
    "Constant",
    "CosineDecay",
    "Linear",
    "OptimizerSpec",
    "Schedule",
    "Sequential",
    "is_bias_or_norm",
    "is_elementwise",
]
