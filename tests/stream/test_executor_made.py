"""An executor that cannot be made leaves the model, its parameters and all threads as they were."""

import threading

import pytest
from harness import Setting, make_plan, regression
from odd_models import WIDTH, linears
from torch import nn

from headwater.stream import executor, recompute, sites
from headwater.stream.engine import Engine


def make_model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    return nn.Sequential(*linears(3), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def attributes(model: nn.Module) -> list[set[str]]:
    return [set(vars(module)) for module in model.modules()]


def raises(*args, **kwargs):
    raise RuntimeError("this part cannot be made")


def failing_second(function):
    """Return a function that raises when it is called for the second time."""
    calls = []

    def call(*args):
        calls.append(args)
        return raises() if len(calls) == 2 else function(*args)

    return call


PARTS = {
    "hooks of gradients": (executor, "GradientHooks", raises),
    "recomputed forwards": (executor, "RecomputedForwards", raises),
    "one recomputed forward": (
        recompute, "_recompute_forward", failing_second(recompute._recompute_forward)
    ),
    "layer of an encoder": (sites, "_ahead_of", raises),
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_cannot_be_made(part, tmp_path, monkeypatch):
    job = regression(make_model, 4, WIDTH)
    model = job.model()
    plan = make_plan(job, model, Setting("disk", 2, "recompute", "disk"), tmp_path)
    before, threads = attributes(model), set(threading.enumerate())
    place, name, replacement = PARTS[part]
    monkeypatch.setattr(place, name, replacement)
    with pytest.raises(RuntimeError, match="cannot be made"):
        Engine(model, plan, job.optimizer, loss_function=job.loss)
    assert attributes(model) == before
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert set(threading.enumerate()) <= threads
