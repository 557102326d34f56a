"""Makes the loggers that the params name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from headwater.config.loggers import (
    MLflowLoggerConfig,
    TrackerConfig,
    TrackioLoggerConfig,
    WandbLoggerConfig,
)
from headwater.core.errors import ConfigError
from headwater.trainer.run_dir import RunDir
from headwater.trainer.tracking.mlflow_runs import MLflowRun
from headwater.trainer.tracking.tracker import Service, Tracker
from headwater.trainer.tracking.trackio_runs import TrackioRun
from headwater.trainer.tracking.weights_and_biases import WandbRun

if TYPE_CHECKING:
    from headwater.config.run import CommonInitConfig

_PACKAGES = {
    WandbLoggerConfig: ("WandbLogger", "wandb", "wandb"),
    MLflowLoggerConfig: ("MLflowLogger", "mlflow", "mlflow"),
    TrackioLoggerConfig: ("TrackioLogger", "trackio", "trackio"),
}
"""Kind of a section -> name of the logger, its module, and the extra of Headwater that installs it."""


def import_packages(init: CommonInitConfig) -> None:
    """Import the packages of the loggers that the params name.

    This comes before the plan, because their memory belongs to the process (MLflow: 130 MiB).

    Raises:
        ConfigError: if a package is not installed.
    """
    for config in init.trackers:
        name, module, extra = _PACKAGES[type(config)]
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"{name} needs the package {module}, which is not installed",
                where="trainer.init.loggers",
                remedy=f"pip install 'headwater[{extra}]', or remove the logger",
            ) from error


def make_trackers(init: CommonInitConfig, run_dir: RunDir) -> list[Tracker]:
    """Return a callback for each of these loggers in the params."""
    return [Tracker(_service(config), run_dir, init.logging.log_steps) for config in init.trackers]


def _service(config: TrackerConfig) -> Service:
    match config:
        case WandbLoggerConfig():
            return Service("WandbLogger", lambda run: WandbRun(config, run), config.resume, config.run_id)
        case MLflowLoggerConfig():
            return Service("MLflowLogger", lambda run: MLflowRun(config, run), config.resume, config.run_id)
        case TrackioLoggerConfig():
            return Service("TrackioLogger", lambda run: TrackioRun(config, run), config.resume)
