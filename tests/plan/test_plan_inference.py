"""Plans for evaluation: no activations for a backward, no gradients, no optimizer state."""

import functools
import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from headwater.core.errors import DoesNotFitError
from headwater.core.precision import Precision
from headwater.core.units import GIB, MIB
from headwater.plan.budget import make_plan
from headwater.plan.options import Fixed, PlanRequest
from headwater.plan.predict import NOMINAL
from headwater.plan.report import render_plan
from headwater.plan.trace import trace_step
from headwater.plan.types import Activations, Resources

BF16 = Precision("bf16")


@functools.cache
def traces(inference):
    config = GPT2Config(n_layer=6, n_embd=256, n_head=4, vocab_size=1000, n_positions=256, use_cache=False)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)

    @functools.cache
    def trace_for(size):
        tokens = torch.zeros(size, 256, dtype=torch.long, device="meta")
        return trace_step(
            model, tokens, BF16, loss_function=lambda m, t: m(t, labels=t).loss, inference=inference
        )

    return trace_for


def plan(inference, host_memory=GIB, optimizer_state_bytes=8, **changes):
    return make_plan(
        PlanRequest(
            traces(inference),
            batch_size=8,
            precision=BF16,
            optimizer_state_bytes=0 if inference else optimizer_state_bytes,
            resources=Resources(host_memory=host_memory, disk=changes.pop("disk", None), disk_bytes=GIB),
            base_bytes=0,
            calibration=NOMINAL,
            **changes,
        )
    )


def test_stages_are_used_once_and_nothing_is_saved():
    trained, evaluated = traces(False)(2), traces(True)(2)
    assert evaluated.uses == trained.uses == evaluated.schedule
    assert [cost.forward.flops for cost in evaluated.costs] == [cost.forward.flops for cost in trained.costs]
    assert not any(cost.saved_bytes or cost.backward.flops for cost in evaluated.costs)


def test_activations_alive_at_once_are_counted():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

        def forward(self, x):
            kept = [layer(x) for layer in self.layers]  # one more is alive with each
            del kept[0]
            return (kept[0] + kept[1]).view(-1)

    rows = 32
    trace = trace_step(Wide(), torch.zeros(rows, 16), loss_function=lambda m, x: m(x), inference=True)
    output = rows * 16 * 4
    assert [cost.transient_bytes for cost in trace.costs] == [output, 2 * output, 3 * output]


def test_evaluation_fits_where_training_does_not():
    needed = plan(True).prediction.host_bytes
    with pytest.raises(DoesNotFitError):
        plan(False, host_memory=needed)
    parts = plan(True, host_memory=needed).prediction.host_parts
    assert parts["gradients"] == 0
    assert parts["weight store"] == pytest.approx(4 * 5.06e6, rel=0.03), "masters alone"


def test_depth_costs_no_activations():
    peak = max(cost.transient_bytes for cost in traces(True)(8).costs)
    assert plan(True).prediction.host_parts["activations"] == peak < 64 * MIB


def test_decisions_about_the_backward_are_ignored():
    fixed = Fixed(activations=Activations.OFFLOAD, gradient_tier="disk", tier="disk")
    chosen = plan(True, fixed=fixed, disk=Path("tier"))
    assert set(chosen.activations) == {Activations.KEEP}
    assert chosen.gradient_tier == "memory"
    assert chosen.tier == "disk"


def test_a_forward_takes_less_time_than_a_step():
    forward, step = plan(True).prediction, plan(False).prediction
    assert 0 < forward.step_s < step.step_s / 2
    assert forward.step_parts["update"] == 0


def test_the_report_does_not_mention_gradients():
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(render_plan(plan(True)))
    assert "nothing is kept for backward" in console.export_text()
