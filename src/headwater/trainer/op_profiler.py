"""The callback that profiles some steps of a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING

from headwater.core.errors import ConfigError
from headwater.profiler.files import check_folder, write_profile
from headwater.profiler.profile import table_of
from headwater.profiler.taking import ProfiledSteps
from headwater.trainer.callback import Callback, FitStart, StepEnd

if TYPE_CHECKING:
    from rich.console import Console

    from headwater.config.sections import OpProfilerConfig

logger = logging.getLogger(__name__)

_WHERE = "OpProfiler"


class OpProfiler(Callback):
    """Profiles the steps from `start_step` to `end_step`, both included, and writes the profile to a folder.

    Modules are timed during these steps alone. The results of the training do not change. This callback
    runs before all others, because their time does not belong to a step.

    Args:
        start_step: first profiled step, from 1.
        end_step: last profiled step.
        folder: folder of the files.
        console: where the table is printed.
        depth: levels of modules with rows below the module of a stage.
        operators: list the operators inside modules too.

    Raises:
        ConfigError: if `start_step` is less than 1 or greater than `end_step`.
    """

    def __init__(
        self,
        start_step: int,
        end_step: int,
        folder: Path,
        console: Console | None = None,
        *,
        depth: int = 1,
        operators: bool = False,
    ) -> None:
        if not 1 <= start_step <= end_step:
            raise ConfigError(
                f"expected 1 <= start_step <= end_step, got start_step {start_step} and end_step {end_step}",
                where=_WHERE,
                remedy="name the first and the last step to profile, counted from 1",
            )
        self._start_step = start_step
        self._end_step = end_step
        self._folder = folder
        self._console = console
        self._depth = depth
        self._operators = operators
        self._taken: ProfiledSteps | None = None
        self._run: FitStart | None = None

    def on_fit_start(self, event: FitStart) -> None:
        check_folder(self._folder)
        check_range(self._start_step, self._end_step, event.start_step, event.end_step)
        self._run = event
        self._begin_before(event.start_step + 1)

    def _begin_before(self, step: int) -> None:
        """Begin the profile if `step`, the next one, is a profiled step."""
        if self._taken is None and self._start_step <= step <= self._end_step:
            assert self._run is not None, "a run starts before its first step"
            self._taken = ProfiledSteps(
                self._run.model, self._run.plan, depth=self._depth, operators=self._operators
            )

    def on_step_end(self, event: StepEnd) -> None:
        # First: the work of this callback does not belong to the step.
        end = perf_counter_ns()
        if self._taken is not None:
            self._taken.add_step(event.step, end - int(1e9 * event.step_s), end)
            if event.step >= self._end_step:
                self._finish()
        self._begin_before(event.step + 1)

    def on_fit_end(self) -> None:
        if self._taken is not None:  # the run ends before the last profiled step
            self._finish()

    def _finish(self) -> None:
        taken, self._taken = self._taken, None
        assert taken is not None, "a profile has begun"
        taken.close()
        if not taken.has_steps:
            return
        profile = taken.finish()
        if self._console is not None:
            self._console.print(table_of(profile))
        write_profile(self._folder, profile)
        logger.info("profile: %s", self._folder)


def make_op_profilers(
    configs: Sequence[OpProfilerConfig], folder: Path, console: Console | None
) -> list[Callback]:
    """Return one callback for each profile. If there are several, each has a subfolder named by its steps."""
    return [
        OpProfiler(
            config.start_step,
            config.end_step,
            folder if len(configs) == 1 else folder / f"steps_{config.start_step}_to_{config.end_step}",
            console,
            depth=config.depth,
            operators=config.operators,
        )
        for config in configs
    ]


def check_range(start_step: int, end_step: int, done: int, last: int) -> None:
    """Check that a run reaches the steps to profile; warn if it ends among them or has done them all.

    Args:
        start_step: first profiled step.
        end_step: last profiled step.
        done: steps that are done already.
        last: last step of the run.

    Raises:
        ConfigError: if the run ends before `start_step`.
    """
    if start_step > last:
        raise ConfigError(
            f"expected steps to profile between 1 and {last}, the last step of the run, got {start_step} to "
            f"{end_step}",
            where=_WHERE,
            remedy=f"profile steps up to {last}, or set a larger max_steps",
        )
    if end_step <= done:
        logger.warning("steps %d to %d are not profiled: step %d is done", start_step, end_step, done)
    elif end_step > last:
        logger.warning("the profile ends with the run at step %d, not at step %d", last, end_step)
