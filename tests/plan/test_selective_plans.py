"""Plans that compute the values of cheap operators again."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from headwater.core.precision import Precision
from headwater.core.units import GIB, MIB
from headwater.plan.budget import make_plan
from headwater.plan.options import Fixed, PlanRequest
from headwater.plan.predict import NOMINAL
from headwater.plan.trace import trace_step
from headwater.plan.types import Activations, Resources

ROWS, WIDTH, DEPTH = 16384, 256, 6
VALUE = ROWS * WIDTH * 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.second(nn.functional.gelu(self.first(self.norm(x))))


@pytest.fixture(scope="module")
def trace():
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(DEPTH)))
    return trace_step(
        model, torch.empty(ROWS, WIDTH, device="meta"), loss_function=lambda model, x: model(x).mean()
    )


def planned(trace, **changes):
    request = PlanRequest(
        lambda _: trace,
        batch_size=ROWS,
        precision=Precision(),
        optimizer_state_bytes=8,
        resources=Resources(host_memory=changes.pop("host_memory", None), disk=changes.pop("disk", None)),
        fixed=Fixed(
            tier=changes.pop("tier", None),
            ranges=changes.pop("ranges", None),
            activations=changes.pop("activations", None),
            micro_batch_size=ROWS,
            compiled=changes.pop("compiled", False),
        ),
        base_bytes=100 * MIB,
        checkpoints=False,
        **changes,
    )
    return make_plan(request)


def test_a_forward_that_changes_weights_keeps_its_activations(trace):
    class Clamped(Block):
        def forward(self, x):
            y = super().forward(x)
            self.norm.weight.data.clamp_(max=1)  # a value that needs the old weight could not run again
            return y

    with torch.device("meta"):
        model, x = nn.Sequential(Clamped(), *(Block() for _ in range(3))), torch.empty(ROWS, WIDTH)
    written = trace_step(model, x, loss_function=lambda model, x: model(x).mean())
    assert all(cost.cheap_bytes for cost in written.costs)
    assert set(planned(written, activations=Activations.SELECTIVE).activations) == {Activations.KEEP}
    within = planned(written).prediction.host_bytes - 4 * MIB
    assert Activations.SELECTIVE not in planned(written, host_memory=within).activations


def test_without_a_budget_all_activations_are_kept(trace):
    assert set(planned(trace, calibration=NOMINAL).activations) == {Activations.KEEP}


def test_selective_plans_count_less_memory_and_a_little_more_time(trace):
    kept, selective, recomputed = (
        planned(trace, activations=policy, calibration=NOMINAL)
        for policy in (Activations.KEEP, Activations.SELECTIVE, Activations.RECOMPUTE)
    )
    saved = kept.prediction.host_parts["activations"] - selective.prediction.host_parts["activations"]
    assert 2 * VALUE * (DEPTH - 1) <= saved <= 2 * VALUE * DEPTH
    assert kept.prediction.step_s < selective.prediction.step_s < recomputed.prediction.step_s


def test_a_budget_takes_cheap_operators_before_whole_blocks(trace):
    kept = planned(trace, activations=Activations.KEEP)
    selective = planned(trace, activations=Activations.SELECTIVE)
    assert set(selective.activations) == {Activations.SELECTIVE}
    between = planned(trace, host_memory=(kept.prediction.host_bytes + selective.prediction.host_bytes) // 2)
    assert set(between.activations) == {Activations.SELECTIVE}
    below = planned(trace, host_memory=selective.prediction.host_bytes - 4 * MIB)
    assert set(below.activations) == {Activations.SELECTIVE, Activations.RECOMPUTE}


def on_disk(trace, *, saved_bytes_per_s=100 * GIB, **changes):
    rates = dataclasses.replace(NOMINAL, fp32_saved_bytes_per_s=saved_bytes_per_s)
    return planned(trace, tier="disk", disk=Path("tier"), calibration=rates, **changes)


def test_without_a_budget_weights_on_disk_bring_selective_recomputation_where_it_costs_little(trace):
    fastest = on_disk(trace, activations=Activations.KEEP)
    plan = on_disk(trace, ranges=True)
    assert set(plan.activations) == {Activations.SELECTIVE}
    assert fastest.prediction.step_s < plan.prediction.step_s <= 1.03 * fastest.prediction.step_s
    assert plan.prediction.host_bytes < fastest.prediction.host_bytes


def test_without_a_budget_activations_are_kept_where_selective_recomputation_costs_much(trace):
    slow = on_disk(trace, ranges=True, saved_bytes_per_s=GIB)
    assert set(slow.activations) == {Activations.KEEP}
    # Without ranges, each value that is computed again would get new pages from the system.
    assert set(on_disk(trace, ranges=False).activations) == {Activations.KEEP}
    # In a user's loop, functions that the user has compiled would run eagerly.
    assert set(on_disk(trace, ranges=True, user_loop=True).activations) == {Activations.KEEP}
    assert set(on_disk(trace, ranges=True, compiled=True).activations) == {Activations.KEEP}
    assert set(planned(trace, calibration=NOMINAL, ranges=True).activations) == {Activations.KEEP}


def test_compiled_blocks_are_not_recomputed_selectively(trace):
    asked = planned(trace, activations=Activations.SELECTIVE, compiled=True)
    assert set(asked.activations) == {Activations.KEEP}
    whole = planned(trace).prediction.host_bytes
    less = {
        compiled: planned(trace, host_memory=whole - VALUE, compiled=compiled) for compiled in (False, True)
    }
    assert Activations.SELECTIVE in less[False].activations
    assert set(less[True].activations) == {Activations.KEEP, Activations.RECOMPUTE}
