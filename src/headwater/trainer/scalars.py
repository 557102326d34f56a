"""The numbers of a run by the names that TensorBoard and the other loggers show."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.trainer.callback import StepEnd, ValidateEnd


def step_scalars(event: StepEnd) -> dict[str, float]:
    """Return the numbers of a training step, by name."""
    rate, unit = event.rate
    return {
        "train/loss": event.loss,
        "train/learning_rate": event.learning_rate,
        f"train/{unit}_per_s": rate,
        "train/gradient_norm": event.gradient_norm,
        "train/loss_scale": event.loss_scale,
        "stream/bytes_in": event.bytes_in,
        "stream/bytes_out": event.bytes_out,
        "stream/slab_hit_rate": event.hit_rate,
        "stream/wait_s": event.wait_s,
        **{f"time/{kind.replace(' ', '_')}_s": seconds for kind, seconds in event.busy_s.items()},
        **event.metrics,
    }


def validation_scalars(event: ValidateEnd) -> dict[str, float]:
    """Return the numbers of an evaluation, by name. Those of later data sets have its position at the end."""
    suffix = f"_{event.loader}" if event.loader else ""
    values = {f"validate/loss{suffix}": event.loss}
    if event.weight_norm is not None:
        values["validate/weight_norm"] = event.weight_norm
    return values | {f"validate/{name}{suffix}": value for name, value in event.metrics.items()}


def task_scalars(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the scores of an evaluation on tasks, by name."""
    return {f"tasks/{name}": value for name, value in scores.items()}
