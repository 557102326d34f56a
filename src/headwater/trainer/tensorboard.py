"""Event files for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.core.files import check_place, disk_errors
from headwater.trainer.callback import Callback, FitStart, StepEnd, ValidateEnd
from headwater.trainer.scalars import step_scalars, task_scalars, validation_scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TRAIN, EVAL = "train", "eval"
"""Names of the folders of event files, as in the Cerebras documents."""


class TensorBoard(Callback):
    """Writes event files: of training into `train/`, of evaluations into `eval/`. Needs tensorboard.

    Args:
        folder: the folder in which these two are made.
        log_steps: steps between two training records.
    """

    def __init__(self, folder: Path, log_steps: int = 1) -> None:
        self._folder = folder
        self._log_steps = log_steps
        self._purge_step: int | None = None
        self._writers: dict[str, SummaryWriter] = {}

    def on_fit_start(self, event: FitStart) -> None:
        # Steps after a killed run's last checkpoint are trained again, so their first records are removed.
        self._purge_step = event.start_step + 1
        for part in (TRAIN, EVAL):
            check_place(self._folder / part, expected="a folder")
        self._writer(TRAIN)

    def on_step_end(self, event: StepEnd) -> None:
        if event.step % self._log_steps:
            return
        self._add(TRAIN, event.step, step_scalars(event))

    def on_validate_end(self, event: ValidateEnd) -> None:
        self._add(EVAL, event.step, validation_scalars(event))

    def on_scores(self, step: int, scores: Mapping[str, float]) -> None:
        self._add(EVAL, step, task_scalars(scores))

    def on_fit_end(self) -> None:
        for writer in self._writers.values():
            with disk_errors(self._folder):
                writer.close()

    def _writer(self, part: str) -> SummaryWriter:
        """Return the writer of the folder `train` or `eval`."""
        from torch.utils.tensorboard import SummaryWriter

        assert self._purge_step is not None, "a run starts before its first step"
        # The writer, which makes its folder, is made late: a run without evaluations has no folder for them.
        if part not in self._writers:
            with disk_errors(self._folder):
                self._writers[part] = SummaryWriter(str(self._folder / part), purge_step=self._purge_step)
        return self._writers[part]

    def _add(self, part: str, step: int, values: dict[str, float]) -> None:
        writer = self._writer(part)
        with disk_errors(self._folder):
            for name, value in values.items():
                writer.add_scalar(name, value, step)
