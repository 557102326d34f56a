"""Measures the memory of training a stack of layers in a new process, for comparison with its plan."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from headwater.core.precision import Precision
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import make_plan
from headwater.plan.options import PlanRequest
from headwater.plan.trace import trace_step
from headwater.store.update import Update
from headwater.stream.engine import Engine


def output_of(script, *words, mmap_threshold):
    """Run a script in a new process, and return what it prints as JSON.

    Args:
        script: the script. It can import the modules of this folder.
        words: its arguments.
        mmap_threshold: bytes from which on freed memory goes back to the system at once.
    """
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(mmap_threshold)},
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _status("VmRSS")
    with _engine(layers_of, depth, width, rows, resources, fixed) as large:
        batch = torch.randn(rows, width)
        _train(large, batch)
        parts = large.plan.prediction.host_parts
    predicted = sum(parts.values()) - parts["interpreter"] + batch.nbytes
    return {"rise": _status("VmHWM") - before, "predicted": predicted, "input": batch.nbytes}


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


def _status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))
