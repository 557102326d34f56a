"""Models that are called under autocast and outside of it: the weights are streamed in fp32 from then on."""

import contextlib
import warnings

import pytest
import torch
from torch import nn

import headwater as hw
from headwater.api.replanning import PrecisionWarning
from headwater.core.errors import StreamError

PLANS = {"memory": {}, "slabs": {"num_slabs": 2}, "disk": {"tier": "disk", "num_slabs": 2}}


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def network():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)])


def inputs(index):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(index))


def trained(model, calls):
    """Train with calls (under autocast, with gradients); return their outputs and the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    shown = []
    for index, (half, learns) in enumerate(calls):
        with autocast() if half else contextlib.nullcontext():
            if learns:
                output = model.train()(inputs(index))
                output.float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with torch.no_grad():
                    output = model.eval()(inputs(index))
        shown.append(output.detach().clone())
    return shown + [value.clone() for value in model.state_dict().values()]


def streamed(plan, folder):
    options = PLANS[plan] | ({"disk": folder} if plan == "disk" else {})
    return hw.compile(network(), hw.backend("CSX", **options))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "calls",
    [
        [(True, True), (True, True), (False, False), (True, True), (False, False)],
        [(True, True), (False, True), (True, True), (True, False)],
        [(True, False), (False, False), (True, True), (False, True)],
    ],
    ids=["evaluates_in_fp32", "trains_in_both", "evaluates_first"],
)
def test_calls_under_autocast_and_outside_give_the_bits_of_plain_pytorch(plan, calls, tmp_path):
    expected = trained(network(), calls)
    with pytest.warns(PrecisionWarning, match="streamed in fp32 from now on") as warned:
        found = trained(streamed(plan, tmp_path), calls)
    assert len(warned) == 1
    for want, have in zip(expected, found, strict=True):
        assert want.dtype == have.dtype
        assert torch.equal(want, have)


@pytest.mark.parametrize("plan", PLANS)
def test_a_backward_that_waits_while_the_precision_changes_is_equal_or_refused(plan, tmp_path):
    def gradients(model):
        with autocast():
            half = model(inputs(0))
        whole = model(inputs(1))
        (half.float().square().mean() + whole.square().mean()).backward()
        return [param.grad.clone() for param in model.parameters()]

    expected = gradients(network())
    model = streamed(plan, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        try:
            found = gradients(model)
        except StreamError as error:
            assert "without autocast" in str(error)
            return
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("plan", PLANS)
def test_lazy_modules_whose_first_call_is_outside_of_autocast_are_streamed_in_fp32(plan, tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.mix = nn.LazyLinear(8)

        def forward(self, x):
            return self.mix(x) * self.scale

    def gradients(compiled):
        torch.manual_seed(0)
        model = compiled(nn.Sequential(Scaled(), nn.Linear(8, 8)))
        whole = model(inputs(0))  # creates the parameters
        with autocast():
            half = model(inputs(1))
        (half.float().square().mean() + whole.square().mean()).backward()
        return [half.float()] + [param.grad.clone() for param in model.parameters()]

    options = PLANS[plan] | ({"disk": tmp_path} if plan == "disk" else {})
    found = gradients(lambda model: hw.compile(model, hw.backend("CSX", **options)))
    assert all(map(torch.equal, gradients(lambda model: model), found))


@pytest.mark.filterwarnings("ignore::headwater.api.replanning.PrecisionWarning")
def test_a_small_evaluation_that_needs_a_new_plan_leaves_no_plan_that_is_too_small_for_training(tmp_path):
    model = streamed("memory", tmp_path)
    sizes = []
    for index, (half, learns) in enumerate([(True, True), (False, False), (True, True)]):
        with autocast() if half else contextlib.nullcontext(), torch.set_grad_enabled(learns):
            output = model.train(learns)(inputs(index)[: None if learns else 1])
        if learns:
            output.float().square().mean().backward()
        sizes.append(model._headwater.engine.plan.trace.micro_batch_size)
    assert sizes == [4, 1, 4]
