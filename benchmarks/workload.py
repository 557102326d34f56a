"""The workload of all benchmarks, a GPT of given shape on fixed random tokens, and its measurement."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict, get_args

import torch

from benchmarks.options import at_least
from benchmarks.resident import peak_rss_bytes

if TYPE_CHECKING:
    from headwater.plan.types import Plan

Dtype = Literal["fp32", "bf16"]

Step = Callable[[int], float]
"""A function that runs one optimizer step and returns its loss."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """A GPT-2 shape, a batch and a precision; the run trains on `rotate` batches in turn."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 50257
    sequence: int = 512
    batch: int = 4
    dtype: Dtype = "bf16"
    steps: int = 6
    warmup: int = 2
    rotate: int = 4

    def tokens(self, index: int) -> torch.Tensor:
        """Return the [batch, sequence + 1] token ids of step `index`."""
        generator = torch.Generator().manual_seed(1234 + index % self.rotate)
        return torch.randint(0, self.vocab, (self.batch, self.sequence + 1), generator=generator)

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.sequence


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one option for each field of `Workload`."""
    for field in dataclasses.fields(Workload):
        if field.name == "dtype":
            parser.add_argument("--dtype", default=field.default, choices=get_args(Dtype))
        else:
            least = 0 if field.name == "warmup" else 1
            parser.add_argument(f"--{field.name}", type=at_least(least), default=field.default)


def workload_of(args: argparse.Namespace) -> Workload:
    """Return the workload of these options."""
    return Workload(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Workload)})


def workload_options(workload: Workload) -> list[str]:
    """Return the options for `workload`."""
    return [f"--{key}={value}" for key, value in dataclasses.asdict(workload).items()]


class MeasuredPlan(TypedDict):
    """The plan of a run of Headwater, with its predictions."""

    flops_per_step: float
    tier: str
    stages_in_memory: int
    in_place: bool
    slabs: int
    micro_batch_size: int
    activations: list[str]
    predicted_step_s: float | None
    predicted_step_parts: dict[str, float]
    predicted_host_bytes: int
    predicted_host_parts: dict[str, int]


class Measured(TypedDict):
    """The measurements of one run; `plan` is `None` for other systems than Headwater."""

    first_step_s: float
    step_s: float
    step_s_best: float
    tokens_per_s: float
    peak_rss_bytes: int
    first_loss: float
    last_loss: float
    load: float
    parameters: int
    plan: MeasuredPlan | None


def described(plan: Plan) -> MeasuredPlan:
    """Return the decisions and the predictions of a plan."""
    predicted = plan.prediction
    assert predicted is not None, "a plan that was made from a request has a prediction"
    return {
        "flops_per_step": plan.num_micro_batches
        * sum(cost.forward.flops + cost.backward.flops for cost in plan.trace.costs),
        "tier": plan.tier,
        "stages_in_memory": len(plan.trace.stages) - len(plan.on_disk),
        "in_place": plan.in_place,
        "slabs": plan.slabs,
        "micro_batch_size": plan.micro_batch_size,
        "activations": sorted({policy.value for policy in plan.activations}),
        "predicted_step_s": predicted.step_s,
        "predicted_step_parts": predicted.step_parts,
        "predicted_host_bytes": predicted.host_bytes,
        "predicted_host_parts": predicted.host_parts,
    }


def measure(
    workload: Workload, step: Step, *, parameters: int, plan: Callable[[], MeasuredPlan] | None = None
) -> None:
    """Run the warm-up and the counted steps, and print the measurements as one JSON line.

    Args:
        workload: the workload.
        step: runs one step, and returns its loss.
        parameters: number of parameters of the model.
        plan: returns the plan of Headwater; called after the steps.
    """
    losses, times = [], []
    for index in range(workload.warmup + workload.steps):
        start = time.perf_counter()
        losses.append(step(index))
        times.append(time.perf_counter() - start)
    found = None if plan is None else plan()
    print_measured(workload, times, losses, parameters=parameters, plan=found)


def print_measured(
    workload: Workload,
    times: Sequence[float],
    losses: Sequence[float],
    *,
    parameters: int,
    plan: MeasuredPlan | None = None,
) -> None:
    """Print the measurements of a run as one JSON line, from the seconds and the loss of each step."""
    counted = times[workload.warmup :]
    result: Measured = {
        "first_step_s": times[0],
        "step_s": statistics.median(counted),
        "step_s_best": min(counted),
        "tokens_per_s": workload.tokens_per_step / statistics.median(counted),
        "peak_rss_bytes": peak_rss_bytes(),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "load": os.getloadavg()[0],
        "parameters": parameters,
        "plan": plan,
    }
    print("RESULT " + json.dumps(result), flush=True)
