"""A picture of the loss curve of a run."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.core.errors import HeadwaterError
from headwater.core.files import replace_file
from headwater.trainer.callback import Callback
from headwater.trainer.history import read_history

if TYPE_CHECKING:
    from matplotlib.axes import Axes

logger = logging.getLogger(__name__)


class LossCurve(Callback):
    """Draws the losses in a history file when the run ends. If matplotlib is missing, warns instead.

    Args:
        history: the file; it must be complete when `on_fit_end` is called.
        path: the PNG to write.
    """

    def __init__(self, history: Path, path: Path) -> None:
        self._history = history
        self._path = path

    def on_fit_end(self) -> None:
        try:
            draw_loss_curve(self._history, self._path)
        # Any error of matplotlib is only a warning: a missing picture must not make a finished run fail.
        except (HeadwaterError, ImportError, ValueError, ArithmeticError) as error:
            logger.warning("the loss curve was not drawn; the checkpoints are complete: %s", error)


def draw_loss_curve(history: Path, path: Path) -> None:
    """Draw the training and validation losses of a `History` file as a PNG at `path`.

    A run without any step has no picture.
    """
    from matplotlib.figure import Figure

    records = list(read_history(history))
    if not records:
        return
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    _plot(axes, [r for r in records if r["kind"] == "train"], label="training", linewidth=0.8)
    _plot(axes, [r for r in records if r["kind"] == "validate"], label="validation", marker="o")
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    # The picture is drawn in memory first, so that a reader of the file never sees half of it.
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    replace_file(path, picture.getvalue())


def _plot(axes: Axes, records: list[dict[str, float]], **style: Any) -> None:
    if records:
        axes.plot([r["step"] for r in records], [r["loss"] for r in records], **style)
