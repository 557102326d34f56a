"""Train a model in plain PyTorch and by weight streaming, and compare the results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwater.core.precision import Precision, autocast
from headwater.core.seeding import derive_seed
from headwater.optim.spec import OptimizerSpec
from headwater.plan.division import divide
from headwater.plan.partition import find_stages
from headwater.plan.trace import Trace, trace_step
from headwater.plan.types import Activations, Blocks, Plan, Updates
from headwater.store.update import Update
from headwater.stream.engine import Engine
from headwater.stream.options import DEFAULTS, EngineOptions, Initial

SEED = 7
FP32 = Precision()
ADAMW = OptimizerSpec("AdamW", {"lr": 1e-2, "weight_decay": 0.1})


@dataclasses.dataclass(frozen=True)
class Job:
    """A model, the batch of each (step, micro-batch), the loss, the optimizer, and a call after each step."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[[int, int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: OptimizerSpec = ADAMW
    max_norm: float | None = 0.5
    max_value: float | None = None
    micro_batches: int = 1
    after_plain_step: Callable[[nn.Module, int], None] = lambda model, step: None
    after_streamed_step: Callable[[Engine, int], None] = lambda engine, step: None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make_model().train()

    def batches(self, step: int) -> list[Any]:
        return [self.make_batch(step, index) for index in range(self.micro_batches)]

    def update(self, step: int, **changes: Any) -> Update:
        options = {"lr": self.optimizer.kwargs["lr"] / (step + 1)}
        return Update(step, options, max_norm=self.max_norm, max_value=self.max_value, **changes)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Options of weight streaming."""

    tier: str = "memory"
    slabs: int = 2
    activations: str = "keep"
    gradient_tier: str = "memory"
    in_place: bool = False
    precision: Precision = FP32
    in_memory: tuple[int, ...] = ()
    on_device: tuple[int, ...] = ()
    most_stage_bytes: int | None = None  # larger stages are divided
    updates: Updates = "on_fetch"
    user_loop: bool = False
    compiled: bool = False

    def __str__(self) -> str:
        where = "in_place" if self.in_place else f"{self.slabs}_slabs"
        gradients = "-gradients_on_disk" if self.gradient_tier == "disk" else ""
        memory = f"-{len(self.in_memory)}_in_memory" if self.in_memory else ""
        memory += f"-{len(self.on_device)}_on_device" if self.on_device else ""
        divided = f"-{self.most_stage_bytes}_bytes" if self.most_stage_bytes else ""
        early = "-updates_in_backward" if self.updates == "in_backward" else ""
        loop = "-user_loop" if self.user_loop else ""
        compiled = "-compiled" if self.compiled else ""
        return f"{self.tier}{memory}-{where}-{self.activations}{gradients}{divided}{early}{loop}{compiled}"


@dataclasses.dataclass
class History:
    """The results of a run: one entry per step, and the final state."""

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    weights: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


def make_trace(job: Job, model: nn.Module, setting: Setting) -> Trace:
    """Return the dry run of a step. It depends on the precision and the stages of `setting` alone."""
    partition = find_stages(model, setting.precision)
    if setting.most_stage_bytes is not None:
        partition = divide(model, partition, setting.most_stage_bytes)
    return trace_step(
        model, job.make_batch(0, 0), setting.precision, loss_function=job.loss, partition=partition
    )


def make_plan(job: Job, model: nn.Module, setting: Setting, folder: Path, trace: Trace | None = None) -> Plan:
    """Return the plan that `setting` describes, from a dry run that was made before if there is one."""
    trace = make_trace(job, model, setting) if trace is None else trace
    policy = Activations(setting.activations)
    return Plan(
        trace=trace,
        precision=setting.precision,
        device="cpu",
        tier=setting.tier,
        in_place=setting.in_place,
        slabs=setting.slabs,
        activations=tuple(
            policy if cost.recomputable or policy is not Activations.RECOMPUTE else Activations.KEEP
            for cost in trace.costs
        ),
        micro_batch_size=trace.micro_batch_size,
        num_micro_batches=job.micro_batches,
        gradient_tier=setting.gradient_tier,
        disk=folder,
        in_memory=setting.in_memory,
        on_device=setting.on_device,
        updates=setting.updates,
        user_loop=setting.user_loop,
        blocks=Blocks(setting.compiled),
    )


def make_engine(
    job: Job,
    setting: Setting,
    folder: Path,
    *,
    initial: Initial | None = None,
    options: EngineOptions = DEFAULTS,
) -> Engine:
    """Return an engine for `job`."""
    model = job.model()
    plan = make_plan(job, model, setting, folder)
    return Engine(
        model, plan, job.optimizer, initial=initial, seed=SEED, loss_function=job.loss, options=options
    )


def train_streamed(
    job: Job, setting: Setting, folder: Path, *, steps: int, options: EngineOptions = DEFAULTS
) -> History:
    """Train by weight streaming."""
    history = History()
    with make_engine(job, setting, folder, options=options) as engine:
        for step in range(steps):
            report = engine.train_step(job.batches(step), job.update(step))
            job.after_streamed_step(engine, step)
            history.losses.append(report.loss)
            history.norms.append(report.gradient_norm)
        collect(engine, history)
    return history


def collect(engine: Engine, history: History) -> History:
    """Add the final state of an engine to a history."""
    history.weights = {name: value.clone() for name, value in engine.named_masters()}
    history.buffers = {name: value.clone() for name, value in engine.model.named_buffers()}
    return history


def train_plain(job: Job, *, steps: int, precision: Precision = FP32) -> History:
    """Train in plain PyTorch, without this library."""
    model = job.model()
    optimizer = job.optimizer.build(job.optimizer.groups(model.named_parameters()))
    history = History()
    for step in range(steps):
        loss = _plain_backward(job, model, step, precision)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        _clip(job, model)
        for group in optimizer.param_groups:
            group["lr"] = job.optimizer.kwargs["lr"] / (step + 1)
        optimizer.step()
        optimizer.zero_grad()
        job.after_plain_step(model, step)
        history.losses.append(loss)
        history.norms.append(float(norm))
    history.weights = {name: value.detach() for name, value in model.named_parameters()}
    history.buffers = dict(model.named_buffers())
    return history


def _plain_backward(job: Job, model: nn.Module, step: int, precision: Precision) -> float:
    total = 0.0
    for index, batch in enumerate(job.batches(step)):
        torch.manual_seed(derive_seed(SEED, "micro_batch", step, index))
        with autocast(precision, "cpu"):
            loss = job.loss(model, batch)
        total += loss.item()
        (loss / job.micro_batches if job.micro_batches > 1 else loss).backward()
    return total / job.micro_batches


def _clip(job: Job, model: nn.Module) -> None:
    if job.max_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_norm)
    if job.max_value is not None:
        torch.nn.utils.clip_grad_value_(model.parameters(), job.max_value, foreach=False)


def assert_equal(streamed: History, plain: History) -> None:
    """Assert that all numbers of two runs are bit-identical."""
    assert streamed.losses == plain.losses
    assert streamed.norms == plain.norms
    _assert_same(streamed.weights, plain.weights)
    _assert_same(streamed.buffers, plain.buffers)


def _assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different


def check(job: Job, setting: Setting, folder: Path, *, steps: int = 3) -> History:
    """Assert that streaming equals plain PyTorch; return the history of plain PyTorch."""
    plain = train_plain(job, steps=steps)
    assert all(loss == loss for loss in plain.losses), "the reference itself is not finite"
    assert_equal(train_streamed(job, setting, folder, steps=steps), plain)
    return plain


def regression(make_model: Callable[[], nn.Module], *shape: int, **options: Any) -> Job:
    """Return a job that minimises the mean square of a model's output on random input of `shape`."""

    def batch(step: int, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + index)
        return torch.randn(*shape, generator=generator)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - 1).square().mean()

    return Job(make_model, batch, loss, **options)


def token_batch(
    step: int, index: int, *, vocabulary: int = 96, shape: tuple[int, ...] = (2, 12)
) -> torch.Tensor:
    """Return random token ids `[batch, seq]`."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randint(0, vocabulary, shape, generator=generator)
