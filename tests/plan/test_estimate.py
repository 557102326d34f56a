"""Estimated dry runs against real dry runs."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from headwater.config.models.decoder import DecoderConfig
from headwater.core.errors import DoesNotFitError
from headwater.core.precision import Precision
from headwater.models.registry import build_model
from headwater.plan.budget import make_plan
from headwater.plan.estimate import estimated_traces
from headwater.plan.options import PlanRequest
from headwater.plan.trace import trace_step
from headwater.plan.types import Resources

CONFIG = DecoderConfig(
    hidden_size=32, num_hidden_layers=3, num_heads=2, vocab_size=101, max_position_embeddings=16
)


class Traces:
    """Counts the dry runs of a small GPT."""

    def __init__(self):
        self.model = build_model(CONFIG, device="meta").train()
        self.made = []

    @functools.cache  # noqa: B019
    def __call__(self, size):
        self.made.append(size)
        tokens = torch.zeros(size, 16, dtype=torch.long)
        return trace_step(
            self.model, {"input_ids": tokens, "labels": tokens, "attention_mask": tokens}, Precision()
        )


def plan(traces, memory):
    return make_plan(
        PlanRequest(
            traces,
            batch_size=64,
            precision=Precision(),
            optimizer_state_bytes=8,
            resources=Resources(host_memory=memory),
            base_bytes=0,
        )
    )


def counts(cost):
    """Return all numbers of a stage's cost that grow with the samples."""
    whole = dataclasses.asdict(cost)
    # The chunked loss takes as many rows at once as fit its workspace.
    del whole["transient_bytes"]
    phases = {phase: whole.pop(phase) for phase in ("forward", "backward")}
    return whole | {f"{phase} {name}": n for phase, found in phases.items() for name, n in found.items()}


@pytest.mark.parametrize("size", [1, 2, 6, 64])
def test_an_estimate_equals_a_dry_run(size):
    traces = Traces()
    estimate, made = estimated_traces(traces)(size), traces(size)
    assert estimate.micro_batch_size == made.micro_batch_size
    assert (estimate.uses, estimate.sites) == (made.uses, made.sites)
    for stage, (ours, theirs) in enumerate(zip(estimate.costs, made.costs, strict=True)):
        assert counts(ours) == pytest.approx(counts(theirs), rel=0.01), stage


def test_planning_many_sizes_needs_at_most_four_dry_runs():
    traces = Traces()
    chosen = plan(traces, 1 << 30)
    assert len(traces.made) <= 4
    assert chosen.trace is traces(chosen.micro_batch_size)


def test_a_refusal_needs_at_most_three_dry_runs():
    traces = Traces()
    with pytest.raises(DoesNotFitError, match="host_memory"):
        plan(traces, 1 << 10)
    assert set(traces.made) <= {1, 2, 4}
