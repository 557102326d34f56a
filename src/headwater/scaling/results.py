"""Losses of a family's runs, and the comparison of the law's predictions with them."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.errors import ConfigError, DataError
from headwater.core.files import why_unreadable
from headwater.scaling.law import LEVEL, MIN_RUNS, Estimate, Fit, Run, fit_power_law
from headwater.trainer.history import read_history
from headwater.trainer.run_dir import RunDir

if TYPE_CHECKING:
    from headwater.scaling.sizes import Size

COLUMNS = ("name", "flops", "loss")
"""Columns of a table of losses."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The loss that the law predicts for a size to which it was not fitted.

    Attributes:
        name: name of the size.
        compute: FLOPs of its run.
        predicted: the predicted loss.
        loss: the loss of its run; `None` if the run has not ended.
    """

    name: str
    compute: float
    predicted: Estimate
    loss: float | None

    @property
    def error(self) -> float | None:
        """Relative error of the prediction, positive if it is too high; `None` without a loss."""
        return None if self.loss is None else self.predicted.value / self.loss - 1


@dataclasses.dataclass(frozen=True)
class Report:
    """A law, and its predictions.

    Attributes:
        fit: the law, with the runs to which it was fitted.
        predictions: the predictions, by increasing compute.
    """

    fit: Fit
    predictions: tuple[Prediction, ...]

    def to_record(self) -> dict[str, Any]:
        """Return the report as values that JSON can represent."""
        return {
            "law": dataclasses.asdict(self.fit.law),
            "level": LEVEL,
            "exponent": dataclasses.asdict(self.fit.exponent),
            "irreducible": dataclasses.asdict(self.fit.irreducible),
            "runs": [dataclasses.asdict(run) for run in self.fit.runs],
            "predictions": [{**dataclasses.asdict(each), "error": each.error} for each in self.predictions],
        }


def read_loss(size: Size) -> float | None:
    """Return the loss of the evaluation at the end of a size's run; `None` if the run has not ended.

    Raises:
        DataError: if the run has made its last step, but not the evaluation after it.
    """
    history = RunDir(size.model_dir).history
    records = list(read_history(history))
    if all(record["step"] < size.steps for record in records if record["kind"] == "train"):
        return None
    losses = _last_losses(size, records)
    if not losses:
        raise DataError(
            f"expected an evaluation at the last step {size.steps}, found none",
            where=str(history),
            remedy="run headwater scaling run, which continues an interrupted evaluation; it needs "
            "loop.eval_frequency: 1.0 and fit.val_dataloader in the params",
        )
    return losses[-1]


def has_ended(size: Size) -> bool:
    """Return true if a size's run has ended: if it has made its last step and the evaluation after it."""
    return bool(_last_losses(size, read_history(RunDir(size.model_dir).history)))


def _last_losses(size: Size, records: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return the losses of the evaluations after the last step."""
    return [
        float(record["loss"])
        for record in records
        if record["kind"] == "validate" and record["step"] == size.steps and record.get("loader", 0) == 0
    ]


def read_results(sizes: Sequence[Size]) -> list[tuple[str, float, float | None]]:
    """Return name, FLOPs and loss of each size; the loss is `None` if its run has not ended."""
    return [(size.name, size.flops, read_loss(size)) for size in sizes]


def read_table(path: Path) -> list[tuple[str, float, float | None]]:
    """Return name, FLOPs and loss of each line of a CSV file with the columns `COLUMNS`.

    An empty loss stands for a run that has not ended. The lines are returned by increasing FLOPs.

    Raises:
        DataError: if the file cannot be read, or is not such a table.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(
            f"the table cannot be read: {why_unreadable(error)}",
            where=str(path),
            remedy="name a CSV file, or the folder of a family that headwater scaling write has written",
        ) from error
    found = []
    for number, line in enumerate(lines, start=2):
        try:
            name, flops, loss = (line[column] for column in COLUMNS)
            compute = float(flops)
            if not 0 < compute < math.inf:  # NaN would also break the order of the lines
                raise ValueError(f"{compute:g} FLOPs")
            found.append((name, compute, float(loss) if loss else None))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"expected the columns {','.join(COLUMNS)} with finite FLOPs > 0 and a number, got {error!r}",
                where=f"{path}, line {number}",
                remedy="correct the line; leave the loss empty for a run that has not ended",
            ) from error
    return sorted(found, key=lambda each: each[1])


def make_report(results: Sequence[tuple[str, float, float | None]], held_out: int) -> Report:
    """Fit the law to all but the largest sizes, and predict these.

    Args:
        results: name, FLOPs and loss of each size, by increasing FLOPs.
        held_out: number of largest sizes to which the law is not fitted.

    Raises:
        ConfigError: if `held_out` is negative.
        DataError: if a run to which the law is fitted has not ended, if too few are left for the fit, or see
            `fit_power_law`.
    """
    if held_out < 0:
        raise ConfigError(
            f"expected at least 0 sizes to predict, got {held_out}",
            where="--predict",
            remedy="write a number such as 1",
        )
    count = max(len(results) - held_out, 0)
    unfinished = [name for name, _, loss in results[:count] if loss is None]
    if unfinished:
        raise DataError(
            f"expected finished runs for the fit, got unfinished ones: {', '.join(unfinished)}",
            remedy="train them with headwater scaling run, or raise --predict so that they are not fitted",
        )
    if count < MIN_RUNS <= len(results):
        raise DataError(
            f"expected at least {MIN_RUNS} sizes for the fit, got {count} of {len(results)}, because "
            f"{held_out} are held out",
            where="--predict",
            remedy=f"write --predict {len(results) - MIN_RUNS}, or train further sizes",
        )
    fit = fit_power_law([Run(name, flops, loss) for name, flops, loss in results[:count] if loss is not None])
    predictions = (Prediction(name, flops, fit.predict(flops), loss) for name, flops, loss in results[count:])
    return Report(fit, tuple(predictions))
