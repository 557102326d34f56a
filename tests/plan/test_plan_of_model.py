"""Plans from dry runs of real models have known sizes and take seconds."""

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

from headwater.core.precision import Precision
from headwater.core.units import GIB, TIB
from headwater.plan.budget import make_plan
from headwater.plan.options import Fixed, PlanRequest
from headwater.plan.report import group_stages
from headwater.plan.trace import trace_step
from headwater.plan.types import Activations, Resources


class Decoder(nn.Module):
    """Embedding, torch's own transformer layers, and a head with the loss."""

    def __init__(self, layers, width, heads, vocabulary):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), tokens.flatten())


def traces(length, **shape):
    with torch.device("meta"):
        model = Decoder(**shape)

    @functools.cache
    def trace_for(micro_batch_size):
        tokens = torch.zeros(micro_batch_size, length, dtype=torch.long, device="meta")
        return trace_step(model, tokens, Precision("bf16"))

    return trace_for


ARGUMENTS = {"precision": Precision("bf16"), "optimizer_state_bytes": 8, "base_bytes": GIB // 4}


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        ({"layers": 40, "width": 5120, "heads": 40}, 13),
        ({"layers": 96, "width": 12288, "heads": 96}, 175),
    ],
)
def test_large_models_are_planned_on_a_laptop(shape, billions):
    resources = Resources(host_memory=48 * GIB, disk=Path("tier"), disk_bytes=4 * TIB)
    trace_for = traces(2048, vocabulary=50257, **shape)
    plan = make_plan(PlanRequest(trace_for, batch_size=1, resources=resources, **ARGUMENTS))
    assert plan.tier == "disk"
    prediction = plan.prediction
    stored = prediction.host_parts["weight store"] + prediction.disk_parts["weight store"]
    assert stored >= 12 * billions * 1e9
    assert plan.prediction.host_bytes <= 48 * GIB
    assert [group.count for group in group_stages(plan)] == [1, shape["layers"], 1]


@pytest.mark.parametrize("policy", [Activations.KEEP, Activations.RECOMPUTE, Activations.OFFLOAD])
def test_activation_policies_save_memory(policy):
    trace_for = traces(256, layers=8, width=128, heads=4, vocabulary=256)
    resources = Resources(host_memory=4 * GIB, disk=Path("tier"), disk_bytes=GIB)
    fixed = Fixed(activations=policy, micro_batch_size=128)
    plan = make_plan(PlanRequest(trace_for, batch_size=128, resources=resources, fixed=fixed, **ARGUMENTS))
    saved = sum(cost.saved_bytes for cost in plan.trace.costs)
    assert (plan.prediction.host_parts["activations"] > saved) == (policy is Activations.KEEP)
    assert (plan.prediction.disk_bytes > 0) == (policy is Activations.OFFLOAD)
