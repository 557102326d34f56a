"""A picture of a law: losses over compute on logarithmic axes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headwater.core.files import replace_file
from headwater.core.packages import importing
from headwater.scaling.law import LEVEL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from headwater.scaling.results import Prediction, Report

_POINTS = 200
_LAW, _MEASURED, _PREDICTED = "#2b6cb0", "#1f2933", "#b7541a"


def draw_report(report: Report, path: Path) -> None:
    """Draw runs, law, interval and predictions as a PNG at `path`.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    with importing("a picture of the law", "plot"):
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator, NullLocator
    with rc_context({"font.size": 12}):
        figure = Figure(figsize=(9, 5.6), layout="constrained")
        axes = figure.subplots()
        axes.set(xscale="log", yscale="log")
        # Losses span less than a decade: ticks at powers of ten would leave the axis almost without numbers.
        axes.yaxis.set_major_locator(MaxNLocator(7))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="training compute C, FLOPs", ylabel="loss L, nats per token")
        axes.grid(alpha=0.3)
        axes.set_title(_formula(report), loc="left")
        _draw_law(axes, report)
        _draw_runs(axes, report)
        for prediction in report.predictions:
            _draw_prediction(axes, prediction)
        # A law falls from the upper left to the lower right, so the lower left is empty.
        handles, labels = axes.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        axes.legend(unique.values(), unique.keys(), loc="lower left", frameon=False)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=120)
    replace_file(path, picture.getvalue())


def describe_law(report: Report) -> str:
    """Return the formula of the law with its numbers."""
    law = report.fit.law
    return f"L(C) = {law.irreducible:.3f} + {law.scale:.3f} · (C / {law.reference:.3g})^-{law.exponent:.4f}"


def _formula(report: Report) -> str:
    """Return the formula of `describe_law` with raised exponents, in the notation of matplotlib."""
    law = report.fit.law
    digits, power = f"{law.reference:.2e}".split("e")
    reference = rf"{digits} \times 10^{{{int(power)}}}"
    fraction = rf"\left(C \,/\, {reference}\right)^{{-{law.exponent:.4f}}}"
    return rf"$L(C) = {law.irreducible:.3f} + {law.scale:.3f} \cdot {fraction}$"


def _draw_law(axes: Axes, report: Report) -> None:
    """Draw the law with its interval, dashed beyond the largest run to which it was fitted."""
    runs = report.fit.runs
    ends = [run.compute for run in runs] + [each.compute for each in report.predictions]
    compute = np.geomspace(min(ends) / 1.5, max(ends) * 1.5, _POINTS)
    estimates = [report.fit.predict(float(each)) for each in compute]
    lows, highs = [each.low for each in estimates], [each.high for each in estimates]
    axes.fill_between(
        compute, lows, highs, color=_LAW, alpha=0.15, linewidth=0, label=f"{LEVEL:.0%} interval"
    )
    values = np.array([each.value for each in estimates])
    fitted = compute <= runs[-1].compute
    axes.plot(compute[fitted], values[fitted], color=_LAW, label="fitted law")
    axes.plot(compute[~fitted], values[~fitted], color=_LAW, linestyle="--", label="law, extrapolated")


def _draw_runs(axes: Axes, report: Report) -> None:
    runs = report.fit.runs
    losses = [run.loss for run in runs]
    axes.plot([run.compute for run in runs], losses, "o", color=_MEASURED, label="loss of a run")
    for run in runs:
        _annotate(axes, run.name, (run.compute, run.loss), xytext=(7, 7))


def _draw_prediction(axes: Axes, prediction: Prediction) -> None:
    """Draw the predicted loss as a ring, so that the loss of the run stays visible inside it."""
    at = prediction.compute, prediction.predicted.value
    ring: dict[str, Any] = {"color": _PREDICTED, "markersize": 13, "markeredgewidth": 2, "fillstyle": "none"}
    axes.plot(*at, "o", **ring, linestyle="", label="predicted loss")
    text = f"{prediction.name}\npredicted {prediction.predicted.value:.3f}"
    if prediction.loss is not None:
        axes.plot(prediction.compute, prediction.loss, "o", color=_MEASURED, label="loss of a run")
        text += f"\nreached {prediction.loss:.3f}"
    _annotate(axes, text, at, xytext=(-10, -8), horizontalalignment="right", verticalalignment="top")


def _annotate(axes: Axes, text: str, at: tuple[float, float], **style: Any) -> None:
    axes.annotate(text, at, textcoords="offset points", fontsize="small", **style)
