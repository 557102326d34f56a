"""Training of one job in plain PyTorch, and by weight streaming with the fewest slabs."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from benchmarks.transformers_walk.inputs import Draw
from headwater.core.precision import Precision
from headwater.core.seeding import derive_seed
from headwater.optim.spec import OptimizerSpec
from headwater.plan.memory.slabs import minimum_slabs
from headwater.plan.partition import find_stages
from headwater.plan.trace import trace_step
from headwater.plan.types import Activations, Plan
from headwater.store.update import Update
from headwater.stream.engine import Engine

STEPS = 3
SEED = 7
MAX_NORM = 0.5
OPTIMIZER = OptimizerSpec("AdamW", {"lr": 1e-3, "weight_decay": 0.1})


class NotTrainableError(Exception):
    """In plain PyTorch the job has no loss, no gradient or no finite number."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A model and its inputs. A batch is the number of its step, which seeds its random values."""

    make_model: Callable[[], nn.Module]
    inputs: Mapping[str, Draw]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        np.random.seed(0)
        return self.make_model().train()

    def batch(self, step: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(step)
        return {"step": step, "inputs": {name: draw(generator) for name, draw in self.inputs.items()}}


@dataclasses.dataclass
class History:
    """The results of a run: losses and gradient norms by step, weights and buffers at the end."""

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    weights: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def difference(self, plain: History) -> str:
        """Return the first value whose bits differ from those of plain PyTorch; empty if all are equal."""
        for what, mine, others in (
            ("loss", self.losses, plain.losses),
            ("gradient norm", self.norms, plain.norms),
        ):
            for step, (left, right) in enumerate(zip(mine, others, strict=True), 1):
                if left != right:
                    return f"{what} of step {step}: {left} streamed, {right} in plain PyTorch"
        for what in ("weights", "buffers"):
            mine, others = getattr(self, what), getattr(plain, what)
            if mine.keys() != others.keys():
                return f"names of {what}: {sorted(mine.keys() ^ others.keys())[:3]}"
            different = [name for name in mine if not _same(mine[name], others[name])]
            if different:
                return f"{what}: {len(different)} of {len(mine)}, {different[0]} first"
        return ""


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def loss_of(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Return the loss of the model if it returns one, else the mean of squares of all its outputs."""
    np.random.seed(batch["step"])  # some models draw masks from numpy's generator in their forward
    outputs = model(**batch["inputs"])
    loss = getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        return loss.mean()
    tensors = [leaf for leaf in tree_leaves(_plain_tree(outputs)) if isinstance(leaf, torch.Tensor)]
    squares = [_finite(t).square().mean() for t in tensors if t.is_floating_point() and t.requires_grad]
    if not squares:
        raise NotTrainableError("no output has a gradient")
    return torch.stack(squares).sum()


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    """Replace infinite values, which some models return at masked positions."""
    return torch.where(tensor.isfinite(), tensor, 0.0)


def _plain_tree(outputs: Any) -> Any:
    return tuple(outputs.values()) if isinstance(outputs, dict) else outputs


def train_plain(job: Job) -> History:
    """Train three steps in plain PyTorch.

    Raises:
        NotTrainableError: if a loss or gradient is not finite, or nothing has a gradient.
    """
    model = job.model()
    optimizer = OPTIMIZER.build(OPTIMIZER.groups(model.named_parameters()))
    history = History()
    for step in range(STEPS):
        torch.manual_seed(derive_seed(SEED, "micro_batch", step, 0))
        loss = loss_of(model, job.batch(step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        history.losses.append(loss.item())
        history.norms.append(norm.item())
        if not (torch.isfinite(loss) and torch.isfinite(norm)):
            raise NotTrainableError(f"the loss is {loss.item()} and the norm of the gradient {norm.item()}")
        optimizer.step()
        optimizer.zero_grad()
    history.weights = {name: value.detach() for name, value in model.named_parameters()}
    history.buffers = dict(model.named_buffers())
    return history


@dataclasses.dataclass(frozen=True)
class Streamed:
    """A streamed run with its parameters, stages and slabs of a size class."""

    history: History
    numel: int
    stages: int
    slabs: int


def train_streamed(job: Job) -> Streamed:
    """Train the same three steps by weight streaming."""
    model = job.model()
    history = History()
    with tempfile.TemporaryDirectory() as folder:
        plan = _plan(job, model, Path(folder))
        with Engine(model, plan, OPTIMIZER, seed=SEED, loss_function=loss_of) as engine:
            for step in range(STEPS):
                report = engine.train_step(
                    [job.batch(step)], Update(step, dict(OPTIMIZER.kwargs), max_norm=MAX_NORM)
                )
                history.losses.append(report.loss)
                history.norms.append(report.gradient_norm)
            history.weights = {name: value.clone() for name, value in engine.named_masters()}
            history.buffers = {name: value.clone() for name, value in model.named_buffers()}
    numel = sum(value.numel() for value in history.weights.values())
    return Streamed(history, numel, len(plan.trace.stages), plan.slabs)


def _plan(job: Job, model: nn.Module, folder: Path) -> Plan:
    precision = Precision()
    partition = find_stages(model, precision)
    trace = trace_step(model, job.batch(0), precision, loss_function=loss_of, partition=partition)
    return Plan(
        trace=trace,
        precision=precision,
        device="cpu",
        tier="memory",
        in_place=False,
        slabs=minimum_slabs(trace),
        activations=(Activations.KEEP,) * len(trace.stages),
        micro_batch_size=trace.micro_batch_size,
        num_micro_batches=1,
        gradient_tier="memory",
        disk=folder,
    )
