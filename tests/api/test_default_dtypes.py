"""Scripts that change torch's default dtype: the weight store computes in the dtypes of the parameters."""

import pytest
import torch
from any_loop import Place, adamw, assert_equal, check, randn, some_plan
from torch import nn

import headwater as cstorch

other_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])


@pytest.fixture
def default(dtype):
    """Return a function that changes the default dtype; the test restores it."""
    yield lambda: torch.set_default_dtype(dtype)
    torch.set_default_dtype(torch.float32)


def net():
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


@some_plan
@other_dtypes
def test_masters_under_autocast_are_read_and_changed(plan, dtype, default, tmp_path):
    def script(place):
        torch.set_default_dtype(torch.float32)
        model, inputs = place.compile(net()), randn(3, 6, seed=1)
        optimizer = adamw(model.parameters())
        shown = []
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = model(inputs)
            output.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            default()
            with torch.no_grad():
                model[1].weight.mul_(1.5)
                model[2].weight.copy_(torch.full((6, 6), 1 / 3, dtype=torch.float32))
            shown += [param.detach().clone() for param in model.parameters()]
            shown.append(optimizer.state[model[0].weight]["exp_avg"].clone())
        return [shown, model]

    check(script, plan, tmp_path)


@other_dtypes
def test_a_loss_scale_is_applied_in_fp32(dtype, default, tmp_path):
    found = []
    for change in (lambda: None, default):
        torch.manual_seed(0)
        place, model, inputs = Place("memory", tmp_path), net(), randn(3, 6, seed=1)
        change()
        place.compile(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = cstorch.amp.GradScaler(loss_scale=1001.0)
        loss = model(inputs).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append([param.detach().clone() for param in model.parameters()])
        place.release()
        torch.set_default_dtype(torch.float32)
    assert_equal(*found)
