"""Progress of a run: a bar on a terminal or in a notebook, otherwise a line every few steps."""

from __future__ import annotations

from rich.console import Console

from headwater.core.units import counted, format_bytes, format_duration
from headwater.plan.machine import held_bytes
from headwater.trainer.bars import make_bar
from headwater.trainer.callback import Callback, FitStart, StepEnd, ValidateEnd

_RATE_SMOOTHING = 0.9
"""Weight of earlier steps in the rate that is shown, so that one slow step hardly changes the time left."""


class ProgressBar(Callback):
    """Shows loss, tokens/s, bytes streamed and memory against its budget.

    Args:
        console: where it is shown.
        log_steps: steps between two lines, if the console is a file or a pipe.
        log_loss_scale: show the loss scale beside the loss.
    """

    def __init__(self, console: Console, log_steps: int = 1, *, log_loss_scale: bool = False) -> None:
        self._console = console
        self._log_steps = log_steps
        self._log_loss_scale = log_loss_scale
        self._bar = make_bar(console)
        self._budget: int | None = None
        self._end_step = 0
        self._rate: float | None = None
        self._step_s: float | None = None

    def on_fit_start(self, event: FitStart) -> None:
        self._budget = event.plan.host_limit
        self._end_step = event.end_step
        if self._bar is not None:
            self._bar.start(event.start_step, event.end_step)

    def on_step_end(self, event: StepEnd) -> None:
        rate, _ = event.rate
        past = rate if self._rate is None else self._rate
        self._rate = _RATE_SMOOTHING * past + (1 - _RATE_SMOOTHING) * rate
        before = event.step_s if self._step_s is None else self._step_s
        self._step_s = _RATE_SMOOTHING * before + (1 - _RATE_SMOOTHING) * event.step_s
        left_s = (self._end_step - event.step) * self._step_s
        if self._bar is not None:
            self._bar.update(event.step, self._text(event), left_s)
        elif event.step % self._log_steps == 0 or event.step == self._end_step:
            left = f"  {format_duration(left_s)} left" if left_s else ""
            self._print(f"step {event.step}/{self._end_step}  {self._text(event)}{left}")

    def on_validate_end(self, event: ValidateEnd) -> None:
        name = f" {event.loader}" if event.loader else ""
        metrics = "".join(f"  {name} {value:.4f}" for name, value in event.metrics.items())
        batches = counted(event.batches, "batch", "batches")
        self._print(f"step {event.step}  validation{name} loss {event.loss:.4f} ({batches}){metrics}")

    def on_fit_end(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _text(self, event: StepEnd) -> str:
        limit = "" if self._budget is None else f" / {format_bytes(self._budget)}"
        parts = [
            f"loss {event.loss:.4f}",
            *([f"loss scale {event.loss_scale:g}"] if self._log_loss_scale else []),
            f"{self._rate:,.0f} {event.rate[1]}/s",
            f"streamed {format_bytes(event.bytes_in + event.bytes_out)}/step",
            f"memory {format_bytes(held_bytes())}{limit}",
            *(f"{name} {value:.4g}" for name, value in event.metrics.items()),
        ]
        return "  ".join(parts if event.applied else [*parts, "step skipped, not finite"])

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)
