"""The callback that profiles some steps of a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING

from headwater.core.errors import ConfigError
from headwater.core.files import check_place
from headwater.fabric.fabric import ALONE, Fabric
from headwater.profiler.ranks import report
from headwater.profiler.taking import ProfiledSteps
from headwater.trainer.callback import Callback, FitStart, StepEnd

if TYPE_CHECKING:
    from rich.console import Console

    from headwater.config.sections import OpProfilerConfig

logger = logging.getLogger(__name__)

_WHERE = "OpProfiler"


class OpProfiler(Callback):
    """Profiles the steps from `start_step` to `end_step`, both included, and writes the profile to a folder.

    Modules are timed only during these steps. The results of the training do not change. This callback
    runs before all others, so that their time is not counted in a step. All ranks have this callback; after
    the last profiled step they send their times to rank 0, which prints and writes them.

    Attributes:
        folder: folder of the files.

    Args:
        start_step: first profiled step, from 1.
        end_step: last profiled step.
        folder: folder of the files.
        console: where the tables are printed.
        fabric: the ranks.
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
        fabric: Fabric = ALONE,
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
        self.folder = folder
        self._console = console
        self._fabric = fabric
        self._depth = depth
        self._operators = operators
        self._taken: ProfiledSteps | None = None
        self._run: FitStart | None = None

    def on_fit_start(self, event: FitStart) -> None:
        leads = self._fabric.rank == 0
        if leads:
            check_place(self.folder, expected="a folder")  # now: a later error would lose the profile
        check_range(self._start_step, self._end_step, event.start_step, event.end_step, warn=leads)
        self._end_step = min(self._end_step, event.end_step)
        self._run = event
        self._begin_before(event.start_step + 1)

    def _begin_before(self, step: int) -> None:
        """Begin the profile if `step`, the next one, is a profiled step."""
        if self._taken is None and self._start_step <= step <= self._end_step:
            assert self._run is not None, "a run starts before its first step"
            self._taken = ProfiledSteps(
                self._run.model,
                self._run.plan,
                depth=self._depth,
                operators=self._operators,
                rank=self._fabric.rank,
            )

    def on_step_end(self, event: StepEnd) -> None:
        # First, so that the time of this callback is not counted in the step.
        end = perf_counter_ns()
        if self._taken is not None:
            self._taken.add_step(event.step, end - int(1e9 * event.step_s), end)
            if event.step >= self._end_step:
                self._finish(self._fabric)
        self._begin_before(event.step + 1)

    def on_fit_end(self) -> None:
        if self._taken is None:
            return
        # The run was stopped or has failed. Other ranks may have ended, so their times are not requested.
        if self._fabric.rank != 0 or not self._taken.has_steps:
            self._taken.close()
            return
        if self._fabric.size > 1:
            logger.warning("the run ends before the last profiled step: the profile contains only rank 0")
        self._finish(ALONE)

    def _finish(self, fabric: Fabric) -> None:
        """Report the steps so far. All ranks of `fabric` call this."""
        taken, self._taken = self._taken, None
        assert taken is not None, "a profile has begun"
        report(fabric, taken.finish(), self.folder, self._console)


def make_op_profilers(
    configs: Sequence[OpProfilerConfig], folder: Path, console: Console | None, fabric: Fabric
) -> list[Callback]:
    """Return one callback for each profile. If there are several, each has a subfolder named by its steps."""
    return [
        OpProfiler(
            config.start_step,
            config.end_step,
            folder if len(configs) == 1 else folder / f"steps_{config.start_step}_to_{config.end_step}",
            console,
            fabric=fabric,
            depth=config.depth,
            operators=config.operators,
        )
        # Sorted by steps, so that a profile ends with a step before another one begins with the next step.
        for config in sorted(configs, key=lambda config: config.start_step)
    ]


def check_reached(start_step: int, end_step: int, last: int) -> None:
    """Check that a run reaches the steps to profile.

    Args:
        start_step: first profiled step.
        end_step: last profiled step.
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


def check_range(start_step: int, end_step: int, done: int, last: int, *, warn: bool = True) -> None:
    """Check that a run reaches the steps to profile; warn if it begins or ends among them, or has done them.

    Args:
        start_step: first profiled step.
        end_step: last profiled step.
        done: steps that are done already.
        last: last step of the run.
        warn: log warnings; false on all ranks but one.

    Raises:
        ConfigError: if the run ends before `start_step`.
    """
    check_reached(start_step, end_step, last)
    if not warn:
        return
    if end_step <= done:
        logger.warning("steps %d to %d are not profiled: step %d is done", start_step, end_step, done)
        return
    if start_step <= done:
        logger.warning("the profile begins at step %d, not at step %d, which is done", done + 1, start_step)
    if end_step > last:
        logger.warning("the profile ends with the run at step %d, not at step %d", last, end_step)
