"""The predicted time of a step and of the whole run, as a table for a terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from rich.table import Table

from headwater.core.tables import titled_table
from headwater.core.units import format_count, format_duration
from headwater.plan.types import Plan, Prediction

MONTH_S = 30 * 86_400.0
"""Predicted seconds of a run above which the user gets a warning: 30 days."""

_SMALLEST_SHOWN_S = 1e-6
_OVERLAP = "overlap"
_MEANINGS = {
    "update": "the optimizer's work on all parameters",
    "update on device": "the same for the stages in device memory",
    "compute": "forward and backward",
    "copy": "weights copied within host memory",
    "disk": "reads and writes of the disk tier",
    "link": "transfers between host and device",
    _OVERLAP: "time of work that runs beside other work, subtracted",
}


@dataclasses.dataclass(frozen=True)
class RunLength:
    """The remaining steps of a run, and the tokens of a sample.

    Attributes:
        tokens_per_sample: tokens of one sample; 0 if samples do not consist of tokens.
        steps: steps from now to the end of the run; `None` if unknown.
    """

    tokens_per_sample: int = 0
    steps: int | None = None


def step_table(prediction: Prediction) -> Table:
    """Return a table of the predicted time of a step, by kind of work."""
    table = titled_table("Predicted step")
    for justify in ("left", "right", "left"):
        table.add_column("", justify=justify)
    for name, seconds in prediction.step_parts.items():
        if abs(seconds) >= _SMALLEST_SHOWN_S:
            sign = "-" if name == _OVERLAP else ""
            table.add_row(name, sign + format_duration(abs(seconds)), _MEANINGS.get(name, ""))
    assert prediction.step_s is not None, "only a step whose time is predicted is shown"
    table.add_row("step", format_duration(prediction.step_s), style="bold")
    return table


def outlook(plan: Plan, run: RunLength) -> Iterator[str]:
    """Yield lines: the rate of training, the time to the end of the run, and a warning if that is long."""
    step_s = plan.prediction.step_s if plan.prediction is not None else None
    if step_s is None:
        return
    samples = plan.micro_batch_size * plan.num_micro_batches * plan.placement.num_csx
    unit = "tokens" if run.tokens_per_sample else "samples"
    each_s = samples * (run.tokens_per_sample or 1) / step_s
    rate = f"{format_count(each_s) if each_s >= 1000 else format(each_s, '.3g')} {unit}/s"
    if run.steps is None:
        yield f"predicted rate: {rate}"
        return
    whole_s = step_s * run.steps
    steps = "1 step takes" if run.steps == 1 else f"{format_count(run.steps)} steps take"
    yield f"predicted rate: {rate}; {steps} {format_duration(whole_s)}"
    if whole_s > MONTH_S:
        yield (
            f"warning: at this rate the run takes {format_duration(whole_s)}; a smaller model or batch, a "
            "faster device or more ranks shorten it"
        )
