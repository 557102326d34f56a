"""Scalars for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headwater.core.files import disk_errors
from headwater.trainer.callback import Callback, FitStart, StepEnd, ValidateEnd

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Callback):
    """Writes an event file. Needs tensorboard.

    Args:
        folder: where the event file goes.
        log_steps: steps from one training record to the next.
    """

    def __init__(self, folder: Path, log_steps: int = 1) -> None:
        self._folder = folder
        self._log_steps = log_steps
        self._writer: SummaryWriter | None = None

    def on_fit_start(self, event: FitStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What a killed run logged after its last checkpoint happens again; the first time is forgotten.
        with disk_errors(self._folder):
            self._writer = SummaryWriter(str(self._folder), purge_step=event.start_step + 1)

    def on_step_end(self, event: StepEnd) -> None:
        if event.step % self._log_steps:
            return
        rate, unit = event.rate
        self._add(event.step, {
            "train/loss": event.loss,
            "train/learning_rate": event.learning_rate,
            f"train/{unit}_per_s": rate,
            "train/gradient_norm": event.gradient_norm,
            "train/loss_scale": event.loss_scale,
            "stream/bytes_in": event.bytes_in,
            "stream/bytes_out": event.bytes_out,
            "stream/slab_hit_rate": event.hit_rate,
            "stream/wait_s": event.wait_s,
        })  # fmt: skip

    def on_validate_end(self, event: ValidateEnd) -> None:
        suffix = f"_{event.loader}" if event.loader else ""
        self._add(event.step, {f"validate/loss{suffix}": event.loss})
        if event.weight_norm is not None:
            self._add(event.step, {"validate/weight_norm": event.weight_norm})
        self._add(event.step, {f"validate/{name}{suffix}": value for name, value in event.metrics.items()})

    def on_fit_end(self) -> None:
        if self._writer is not None:
            with disk_errors(self._folder):
                self._writer.close()

    def _add(self, step: int, values: dict[str, float]) -> None:
        assert self._writer is not None, "a run starts before its first step"
        with disk_errors(self._folder):
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
