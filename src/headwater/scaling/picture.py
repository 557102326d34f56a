"""A picture of a law: losses over compute on logarithmic axes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headwater.core.errors import ConfigError
from headwater.core.files import replace_file
from headwater.scaling.law import LEVEL

if TYPE_CHECKING:
    from headwater.scaling.results import Report

_POINTS = 100


def draw_report(report: Report, path: Path) -> None:
    """Draw runs, law, interval and predictions as a PNG at `path`.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a picture of the law needs {error.name}", remedy="run: pip install 'headwater[plot]'"
        ) from error
    runs, predictions = report.fit.runs, report.predictions
    ends = [run.compute for run in runs] + [each.compute for each in predictions]
    compute = np.geomspace(min(ends) / 1.5, max(ends) * 1.5, _POINTS)
    estimates = [report.fit.predict(float(each)) for each in compute]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(
        compute,
        [each.low for each in estimates],
        [each.high for each in estimates],
        alpha=0.2,
        label=f"{LEVEL:.0%} interval",
    )
    axes.plot(compute, [each.value for each in estimates], linewidth=1, label=describe_law(report))
    axes.plot([run.compute for run in runs], [run.loss for run in runs], "o", label="fitted runs")
    for run in runs:
        axes.annotate(run.name, (run.compute, run.loss), xytext=(4, 4), textcoords="offset points")
    expected = [(each.compute, each.predicted.value) for each in predictions]
    if expected:
        axes.plot(*zip(*expected, strict=True), "x", color="C3", label="predicted")
    reached = [(each.compute, each.loss) for each in predictions if each.loss is not None]
    if reached:
        axes.plot(*zip(*reached, strict=True), "s", color="C2", fillstyle="none", label="reached")
    axes.set(xscale="log", yscale="log", xlabel="training compute in FLOPs", ylabel="loss in nats per token")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    replace_file(path, picture.getvalue())


def describe_law(report: Report) -> str:
    """Return the formula of the law with its numbers."""
    law = report.fit.law
    return f"L(C) = {law.irreducible:.3f} + {law.scale:.3f} · (C / {law.reference:.3g})^-{law.exponent:.4f}"
