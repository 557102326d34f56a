"""Runs of Trackio."""

from __future__ import annotations

import contextlib
import io
import uuid
from collections.abc import Sequence
from typing import final

from headwater.config.loggers import TrackioLoggerConfig
from headwater.trainer.tracking.service import Opening, Record, Summary, flat


@final
class TrackioRun:
    """An open run of Trackio.

    Args:
        config: the arguments in the params.
        opening: the run.
    """

    def __init__(self, config: TrackioLoggerConfig, opening: Opening) -> None:
        import trackio

        # A random number: Trackio finds an earlier run by its name.
        new = config.run_name or f"{opening.folder.absolute().name}-{uuid.uuid4().hex[:6]}"
        self._name, self._project = opening.continued or new, config.project
        with _without_output():
            self._run = trackio.init(
                project=config.project,
                name=self._name,
                group=config.group,
                space_id=config.space_id,
                config=flat(opening.params),
                resume="never" if opening.continued is None else "allow",
                embed=False,
            )

    @property
    def identifier(self) -> str:
        return self._name

    @property
    def place(self) -> str:
        return f"run {self._name} of project {self._project} (trackio show --project {self._project})"

    def log(self, records: Sequence[Record]) -> None:
        for record in records:
            self._run.log(dict(record.values), step=record.step)

    def finish(self, summary: Summary) -> None:
        step = int(summary.values["final/step"])
        with _without_output():
            self._run.log({"status": summary.status, **summary.values}, step=step)
            self._run.finish()


def _without_output() -> contextlib.AbstractContextManager[object]:
    """Return a context in which the package prints nothing.

    Its messages would break the progress bar.
    """
    return contextlib.redirect_stdout(io.StringIO())
