"""A schedule advances once a step, whether the loop or `amp.optimizer_step` steps it."""

import pytest
import torch

import headwater as cstorch


def rates(steps, *, own_call, resumed_at=None):
    def make():
        param = torch.nn.Parameter(torch.ones(3))
        optimizer = cstorch.optim.configure_optimizer("SGD", [param], learning_rate=1.0)
        schedule = {
            "scheduler": "Linear",
            "initial_learning_rate": 1.0,
            "end_learning_rate": 0.0,
            "steps": 10,
        }
        return param, optimizer, cstorch.optim.configure_lr_scheduler(optimizer, schedule)

    param, optimizer, scheduler = make()
    found = []
    for step in range(steps):
        if step == resumed_at:
            state = scheduler.state_dict()
            param, optimizer, scheduler = make()
            scheduler.load_state_dict(state)
        found.append(optimizer.param_groups[0]["lr"])
        cstorch.amp.optimizer_step(param.square().sum(), optimizer)
        if own_call:
            scheduler.step()
    return found


@pytest.mark.parametrize("resumed_at", [None, 3])
@pytest.mark.parametrize("own_call", [False, True])
def test_the_schedule_advances_once_a_step(own_call, resumed_at):
    expected = [1 - step / 10 for step in range(6)]
    assert rates(6, own_call=own_call, resumed_at=resumed_at) == pytest.approx(expected)
