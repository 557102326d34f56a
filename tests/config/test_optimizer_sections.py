"""Every optimizer and schedule that params can name is the one of `headwater.optim`."""

import pytest
import torch

from headwater.config.optimizers import OptimizerConfig, ScheduleConfig, SimpleScheduleConfig
from headwater.optim import lr_scheduler

SCHEDULES = {
    "ConstantLR": {"learning_rate": 0.5},
    "LinearLR": {"initial_learning_rate": 0.0, "end_learning_rate": 1.0, "total_iters": 7},
    "CosineDecayLR": {"initial_learning_rate": 1.0, "end_learning_rate": 0.1, "total_iters": 7},
    "PolynomialLR": {"initial_learning_rate": 1.0, "end_learning_rate": 0.1, "total_iters": 7, "power": 2.0},
    "ExponentialLR": {"initial_learning_rate": 1.0, "total_iters": 3, "decay_rate": 0.5, "staircase": True},
    "InverseSquareRootDecayLR": {"warmup_steps": 4, "scale": 2.0},
    "CosineAnnealingLR": {"initial_learning_rate": 1.0, "T_max": 5, "eta_min": 0.1},
    "StepLR": {"initial_learning_rate": 1.0, "step_size": 3, "gamma": 0.5},
    "MultiStepLR": {"initial_learning_rate": 1.0, "gamma": 0.5, "milestones": [2, 6]},
}


@pytest.mark.parametrize("name", SimpleScheduleConfig.model_fields)
def test_schedules_have_the_values_of_the_api(name):
    """The same keys make the same schedule."""
    built = ScheduleConfig.model_validate({name: SCHEDULES[name]}).build()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = getattr(lr_scheduler, name)(optimizer, **SCHEDULES[name])
    for step in range(12):
        assert built.value(step) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("name", OptimizerConfig.model_fields)
def test_optimizers_are_built_with_their_own_defaults(name):
    spec = OptimizerConfig.model_validate({name.lower(): {"weight_decay": 0.1}}).spec(0.25)
    parameter = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = spec.build([parameter])
    assert type(optimizer).__name__ == name
    defaults = type(optimizer)([parameter], lr=0.25, weight_decay=0.1).defaults
    same = {key for key in spec.kwargs if optimizer.defaults[key] == defaults[key]}
    assert same == set(spec.kwargs)


def test_milestones_must_be_increasing():
    with pytest.raises(ValueError, match="milestones must be strictly increasing"):
        ScheduleConfig.model_validate({"MultiStepLR": {**SCHEDULES["MultiStepLR"], "milestones": [6, 2]}})
