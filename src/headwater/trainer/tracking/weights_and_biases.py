"""Runs of Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, final

from headwater.config.loggers import WandbLoggerConfig
from headwater.core.errors import ConfigError
from headwater.trainer.tracking.service import Opening, Record, Summary

if TYPE_CHECKING:
    import wandb

STEP = "global_step"
"""The metric that is the x-axis of all others. Steps of the package itself can only grow, but a run that was
killed computes the steps after its last checkpoint again."""


@final
class WandbRun:
    """An open run of Weights & Biases.

    Args:
        config: the arguments in the params.
        opening: the run.

    Raises:
        ConfigError: if the package has no key of the user.
    """

    def __init__(self, config: WandbLoggerConfig, opening: Opening) -> None:
        import wandb

        try:
            self._run: wandb.Run = wandb.init(
                project=config.project,
                entity=config.entity,
                group=config.group,
                job_type=config.job_type,
                tags=config.tags or None,
                name=config.run_name or opening.folder.absolute().name,
                id=opening.continued or config.run_id,
                resume=_resume(config, opening),
                mode=config.mode,
                dir=opening.folder,
                config=dict(opening.params),
                allow_val_change=True,
                # Progress bars are not for a log; the package's own variable asks for them.
                settings=wandb.Settings(silent=True, console=os.environ.get("WANDB_CONSOLE", "off")),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise ConfigError(
                str(error),
                where="trainer.init.loggers: WandbLogger",
                remedy="run wandb login, or write mode: offline",
            ) from error
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP, step_sync=True)

    @property
    def identifier(self) -> str:
        return str(self._run.id)

    @property
    def place(self) -> str:
        """The address of the run; its folder if the run is offline."""
        url = None if self._run.offline else self._run.url  # offline, `url` prints a warning
        return url or str(Path(self._run.dir).parent)

    def log(self, records: Sequence[Record]) -> None:
        for record in records:
            self._run.log({STEP: record.step, **record.values})

    def finish(self, summary: Summary) -> None:
        self._run.summary.update({"status": summary.status, **summary.values})
        self._run.finish(exit_code=int(summary.status == "failed"))


def _resume(config: WandbLoggerConfig, opening: Opening) -> Literal["never", "must", "allow"] | None:
    if opening.continued is None:
        return "never" if config.resume == "never" else None
    return "must" if config.resume == "must" else "allow"
