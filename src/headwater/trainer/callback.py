"""What callbacks are told, and when."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from headwater.plan.types import Plan


@dataclasses.dataclass(frozen=True)
class FitStart:
    """A run begins, or goes on.

    Attributes:
        start_step: steps done before.
        end_step: step at which it ends.
        plan: how it is done.
    """

    start_step: int
    end_step: int
    plan: Plan


@dataclasses.dataclass(frozen=True)
class StepEnd:
    """One training step is done.

    Attributes:
        step: its number, from 1.
        loss: mean over the micro-batches.
        learning_rate: with which it is applied.
        gradient_norm: global 2-norm before clipping.
        applied: `False` if it was skipped because its gradient was not finite.
        loss_scale: factor on its loss.
        tokens: tokens in its batch; 0 where it has no `input_ids`.
        step_s: seconds it took, the wait for its batch included.
        bytes_in: bytes of weights that streamed in.
        bytes_out: bytes of gradients that streamed out.
        hit_rate: share of the uses of stages that found the weights on the device or on their way.
        wait_s: seconds of it spent waiting for weights.
        samples: samples in its batch.
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
    samples: int = 0

    @property
    def rate(self) -> tuple[float, str]:
        """How much was done in a second, and of what: `tokens`, or `samples` where there are none."""
        count, unit = (self.tokens, "tokens") if self.tokens else (self.samples, "samples")
        return count / self.step_s, unit


@dataclasses.dataclass(frozen=True)
class ValidateEnd:
    """One evaluation of one data set is done.

    Attributes:
        step: steps trained before.
        loader: position of its data set among those to evaluate on.
        loss: mean over the samples.
        batches: batches evaluated.
        weight_norm: 2-norm of all parameters, where the callback ComputeNorm asks for it.
        metrics: value of each metric of the model, by name.
    """

    step: int
    loader: int
    loss: float
    batches: int
    weight_norm: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Callback:
    """Is told what happens in a run. Every hook does nothing unless overridden."""

    def on_fit_start(self, event: FitStart) -> None:
        """Before the first step."""

    def on_step_end(self, event: StepEnd) -> None:
        """After each step."""

    def on_validate_end(self, event: ValidateEnd) -> None:
        """After the evaluation of each data set."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """When the checkpoint of a step has been asked for; it is complete no later than at the end."""

    def on_fit_end(self) -> None:
        """After the last step, also if that is because of an error."""
