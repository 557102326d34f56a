"""Optimizers, learning-rate and weight-decay schedulers, and parameter groups."""

from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from headwater.optim import lr_scheduler, weight_decay_scheduler
from headwater.optim.catalog import is_elementwise
from headwater.optim.configure import configure_lr_scheduler, configure_optimizer, configure_scheduler
from headwater.optim.extra import Lamb, Lion
from headwater.optim.param_groups import configure_param_groups
from headwater.optim.schedules import Constant, CosineDecay, Linear, Schedule, Sequential
from headwater.optim.spec import OptimizerSpec, group_options, is_bias_or_norm

__all__ = [
    "ASGD",
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Constant",
    "CosineDecay",
    "Lamb",
    "Linear",
    "Lion",
    "Muon",
    "NAdam",
    "Optimizer",
    "OptimizerSpec",
    "RAdam",
    "RMSprop",
    "Rprop",
    "Schedule",
    "Sequential",
    "configure_lr_scheduler",
    "configure_optimizer",
    "configure_param_groups",
    "configure_scheduler",
    "group_options",
    "is_bias_or_norm",
    "is_elementwise",
    "lr_scheduler",
    "weight_decay_scheduler",
]
