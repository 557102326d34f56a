"""Measurement of the memory of training a stack of layers in this process, for comparison with its plan."""

import dataclasses

import torch
from process_memory import peak_bytes, reset_peak
from torch import nn

from headwater.core.precision import Precision
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import make_plan
from headwater.plan.options import PlanRequest
from headwater.plan.trace import trace_step
from headwater.store.update import Update
from headwater.stream.engine import Engine


def measure(layers_of, *, depth, width, rows, resources, fixed):
    """Train two steps, and return the measured and the predicted bytes and those of an input.

    Args:
        layers_of: returns the layers of a model with a depth and a width.
        depth: number of layers.
        width: width of the model.
        rows: samples of a batch.
        resources: budgets of the plan.
        fixed: decisions of the plan.
    """
    torch.set_num_threads(1)
    with _engine(layers_of, 2, 64, 1024, resources, fixed) as small:  # torch loads libraries at first use
        _train(small, torch.randn(1024, 64))
    before = reset_peak()
    with _engine(layers_of, depth, width, rows, resources, fixed) as large:
        batch = torch.randn(rows, width)
        _train(large, batch)
        parts = large.plan.prediction.host_parts
    predicted = sum(parts.values()) - parts["interpreter"] + batch.nbytes
    return {"rise": peak_bytes() - before, "predicted": predicted, "input": batch.nbytes}


def _engine(layers_of, depth, width, rows, resources, fixed):
    def loss(model, x):
        return model(x).mean()

    with torch.device("meta"):
        model = nn.Sequential(*layers_of(depth, width))
    trace = trace_step(model, torch.empty(rows, width, device="meta"), loss_function=loss)
    plan = make_plan(
        PlanRequest(
            lambda _: trace,
            batch_size=rows,
            precision=Precision(),
            optimizer_state_bytes=8,
            resources=resources,
            fixed=dataclasses.replace(fixed, micro_batch_size=rows),
            checkpoints=False,
        )
    )
    return Engine(
        model,
        plan,
        OptimizerSpec("AdamW", {"lr": 1e-3}),
        loss_function=loss,
        initial=lambda spec: torch.randn(spec.shape) * 0.01,
    )


def _train(streamed, batch):
    for step in range(2):
        streamed.train_step([batch], Update(step, {"lr": 1e-3}))
