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
    WandbLoggerConfig: ("WandbLogger", "wandb"),
    MLflowLoggerConfig: ("MLflowLogger", "mlflow"),
    TrackioLoggerConfig: ("TrackioLogger", "trackio"),
}
"""Kind of a section -> name of the logger, and its package, which is also an extra of Headwater."""


def import_packages(init: CommonInitConfig) -> None:
    """Import the packages of the loggers that the params name.

    This comes before the plan, because their memory belongs to the process (MLflow: 130 MiB).

    Raises:
        ConfigError: if a package is not installed.
    """
    for config in init.trackers:
        name, package = _PACKAGES[type(config)]
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(
                f"{name} needs the package {package}, which is not installed",
                where="trainer.init.loggers",
                remedy=f"pip install 'headwater[{package}]', or remove the logger",
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
