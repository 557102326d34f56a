"""Chooses the callbacks of a run."""

from __future__ import annotations

import importlib.util
import logging

from rich.console import Console

from headwater.config.run import SetupConfig
from headwater.config.sections import TensorBoardLoggerConfig
from headwater.core.errors import ConfigError
from headwater.trainer.bound import BoundSummary
from headwater.trainer.callback import Callback
from headwater.trainer.history import History
from headwater.trainer.loss_curve import LossCurve
from headwater.trainer.op_profiler import make_op_profilers
from headwater.trainer.progress import ProgressBar
from headwater.trainer.run_dir import RunDir
from headwater.trainer.tensorboard import TensorBoard

logger = logging.getLogger(__name__)


def make_callbacks(init: SetupConfig, run_dir: RunDir, console: Console | None) -> list[Callback]:
    """Return the callbacks of a training run.

    The history is always written. Progress needs a console; TensorBoard and the loss curve need their
    libraries to be installed.

    Raises:
        ConfigError: if the params name TensorBoard, but it is not installed.
    """
    # The profiler first: the time of other callbacks does not belong to a step.
    callbacks = [*make_op_profilers(init.profiles, run_dir.profile, console), History(run_dir.history)]
    callbacks.append(BoundSummary())
    if console is not None:
        log_loss_scale = init.precision.log_loss_scale
        callbacks.append(ProgressBar(console, init.logging.log_steps, log_loss_scale=log_loss_scale))
    asked = _asked_tensorboard(init)
    if _is_installed("tensorboard"):
        folder = (asked and asked.summary_dir) or run_dir.path
        callbacks.append(TensorBoard(folder, init.logging.log_steps))
    elif asked is not None:
        raise ConfigError(
            "TensorBoardLogger needs the package tensorboard, which is not installed",
            where="trainer.init.loggers",
            remedy="pip install 'headwater[plot]', or remove the logger",
        )
    # After `History`, which completes its file when the run ends: the curve is drawn from this file.
    if _is_installed("matplotlib"):
        callbacks.append(LossCurve(run_dir.history, run_dir.loss_curve))
    return callbacks


def _asked_tensorboard(init: SetupConfig) -> TensorBoardLoggerConfig | None:
    given = (entry.TensorBoardLogger for entry in init.loggers)
    return next((entry for entry in given if entry is not None), None)


def _is_installed(name: str) -> bool:
    if importlib.util.find_spec(name) is not None:
        return True
    logger.info("%s is not installed: its output is left out (pip install 'headwater[plot]')", name)
    return False
