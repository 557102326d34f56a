"""Chooses the callbacks of a run."""

from __future__ import annotations

import importlib.util
import logging

from rich.console import Console

from headwater.config.loggers import TensorBoardLoggerConfig
from headwater.config.run import CommonInitConfig
from headwater.core.errors import ConfigError
from headwater.fabric.fabric import ALONE, Fabric
from headwater.trainer.bound import BoundSummary
from headwater.trainer.callback import Callback
from headwater.trainer.facts import FactsFile
from headwater.trainer.history import History
from headwater.trainer.loss_curve import LossCurve
from headwater.trainer.notifications import make_notifications
from headwater.trainer.op_profiler import make_op_profilers
from headwater.trainer.progress import ProgressBar
from headwater.trainer.rates import (
    FlopUtilization,
    Meter,
    PerformanceFile,
    RateProfiler,
    measured_flops_per_s,
)
from headwater.trainer.run_dir import FACTS_FILE, RunDir
from headwater.trainer.tensorboard import TensorBoard
from headwater.trainer.tracking.make import make_trackers

logger = logging.getLogger(__name__)

STEP_CALLBACKS = ("OpProfiler", "RateProfiler", "FlopUtilization", "SavePerformanceData")
"""Callbacks in params files that need training steps."""


def make_callbacks(
    init: CommonInitConfig, run_dir: RunDir, console: Console | None, fabric: Fabric = ALONE
) -> list[Callback]:
    """Return the callbacks of a training run on this rank. Ranks other than rank 0 only profile.

    The history is always written. Progress needs a console; TensorBoard and the loss curve need their
    libraries to be installed.

    Raises:
        ConfigError: if the params name TensorBoard, but it is not installed.
    """
    # The profiler comes first, so that the time of other callbacks is not counted in a step.
    callbacks = make_op_profilers(init.profiles, run_dir.profile, console, fabric)
    if fabric.rank != 0:
        return callbacks
    callbacks += [
        History(run_dir.history),
        FactsFile(run_dir.path / FACTS_FILE),
        BoundSummary(),
        *_make_meters(init, run_dir),
    ]
    if console is not None:
        log_loss_scale = init.precision.log_loss_scale
        callbacks.append(ProgressBar(console, init.logging.log_steps, log_loss_scale=log_loss_scale))
    callbacks += make_notifications(init)
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
    callbacks += make_trackers(init, run_dir)
    # The curve comes after `History`: it is drawn from the file that `History` completes when the run ends.
    if _is_installed("matplotlib"):
        callbacks.append(LossCurve(run_dir.history, run_dir.loss_curve))
    return callbacks


def _make_meters(init: CommonInitConfig, run_dir: RunDir) -> list[Callback]:
    """Return the callbacks in the params that measure the speed of the run."""
    meters: list[Meter] = []
    if init.has_callback("RateProfiler"):
        meters.append(RateProfiler())
    if init.has_callback("FlopUtilization"):
        meters.append(FlopUtilization(measured_flops_per_s))
    if init.has_callback("SavePerformanceData"):
        return [*meters, PerformanceFile(run_dir.performance, meters)]
    return [*meters]


def _asked_tensorboard(init: CommonInitConfig) -> TensorBoardLoggerConfig | None:
    given = (entry.TensorBoardLogger for entry in init.loggers)
    return next((entry for entry in given if entry is not None), None)


def _is_installed(name: str) -> bool:
    if importlib.util.find_spec(name) is not None:
        return True
    logger.info("%s is not installed: its output is left out (pip install 'headwater[plot]')", name)
    return False
