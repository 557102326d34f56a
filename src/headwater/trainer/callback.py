"""Callbacks of a run, and the events that they get."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from headwater.plan.types import Plan

if TYPE_CHECKING:
    from headwater.stream.engine import Engine


@dataclasses.dataclass(frozen=True)
class FitStart:
    """The event at the beginning of a run, also of one that continues.

    Attributes:
        start_step: steps done before.
        end_step: the step at which it ends.
        plan: the plan of its steps.
        model: the model that is trained.
        engine: the engine that has the model.
        callbacks: all callbacks of the run.
    """

    start_step: int
    end_step: int
    plan: Plan
    model: nn.Module | None = None
    engine: Engine | None = None
    callbacks: Sequence[Callback] = ()


@dataclasses.dataclass(frozen=True)
class StepEnd:
    """The event after each training step.

    Attributes:
        step: number of the step, from 1.
        loss: mean over the micro-batches.
        learning_rate: of this step.
        gradient_norm: global 2-norm before clipping.
        applied: `False` if it was skipped because its gradient was not finite.
        loss_scale: factor on its loss.
        tokens: tokens in its batch; 0 without `input_ids`.
        step_s: duration in seconds, including the wait for the batch.
        bytes_in: bytes of weights that streamed in.
        bytes_out: bytes of gradients that streamed out.
        hit_rate: fraction of stage uses for which the weights were on the device, or already being copied.
        wait_s: seconds of the step in which it waited for weights.
        memory_bytes: resident host memory of this process after the step, without its data workers.
        samples: samples in its batch.
        busy_s: seconds in which threads were busy, by kind of work; see `headwater.core.recorder.Kind`.
        bound_s: seconds of the computing thread, by the part of the machine that limited it: `compute`,
            `memory`, `disk`, `link`, `input`.
        metrics: further numbers to log, by name; see `Callback.measure`.
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    applied: bool
    loss_scale: float
    tokens: int
    step_s: float
    bytes_in: int
    bytes_out: int
    hit_rate: float
    wait_s: float
    memory_bytes: int = 0
    samples: int = 0
    busy_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bound_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def rate(self) -> tuple[float, str]:
        """The rate as (amount per second, unit). The unit is `tokens`, or `samples` if that is unknown."""
        count, unit = (self.tokens, "tokens") if self.tokens else (self.samples, "samples")
        return count / self.step_s, unit


@dataclasses.dataclass(frozen=True)
class ValidateEnd:
    """The event after the evaluation of a data set.

    Attributes:
        step: steps trained before.
        loader: position of its data set among those to evaluate on.
        loss: mean over the labels or samples.
        batches: batches evaluated.
        weight_norm: 2-norm of all parameters, if the callback ComputeNorm requests it.
        metrics: value of each metric of the model, by name.
    """

    step: int
    loader: int
    loss: float
    batches: int
    weight_norm: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Callback:
    """Base class of callbacks: a run calls its hooks. Every hook does nothing unless overridden."""

    def on_fit_start(self, event: FitStart) -> None:
        """Called before the first step."""

    def measure(self, event: StepEnd) -> Mapping[str, float]:
        """Return numbers about a step that has just ended, by name, for the loggers of the run.

        Called on all callbacks before the first `on_step_end`, whose event has the numbers of all callbacks.
        """
        return {}

    def on_step_end(self, event: StepEnd) -> None:
        """Called after each step."""

    def on_validate_end(self, event: ValidateEnd) -> None:
        """Called after the evaluation of each data set."""

    def on_scores(self, step: int, scores: Mapping[str, float]) -> None:
        """Called after an evaluation on tasks, with each number by `task/metric`."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Called when a background write of a checkpoint begins. It is complete when the run ends."""

    def on_fit_error(self, error: BaseException) -> None:
        """Called when an error ends the run, before `on_fit_end`."""

    def on_fit_end(self) -> None:
        """Called when the run ends, also after an error."""
