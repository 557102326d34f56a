"""Profiles of a user's loop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, final

from rich.console import Console

from headwater.api.model_structure import refuse_no_module
from headwater.api.registry import streamed_models
from headwater.core.files import check_place
from headwater.fabric.membership import current
from headwater.profiler.ranks import report
from headwater.profiler.taking import ProfiledSteps

if TYPE_CHECKING:
    from torch import nn

    from headwater.plan.types import Plan


@final
class LoopProfile:
    """The object that the context of `profile` yields. It collects the times of the loop's steps."""

    def __init__(self, model: nn.Module | None, *, depth: int, operators: bool) -> None:
        self._model = model
        self._taken = ProfiledSteps(model, self._plan, depth=depth, operators=operators, rank=current().rank)
        self._count = 0
        self._begin = perf_counter_ns()

    @property
    def _plan(self) -> Plan | None:
        """The plan of the model; `None` before its first forward."""
        engines = (each.engine for each in streamed_models() if each.model is self._model)
        return next((engine.plan for engine in engines if engine is not None), None)

    def step(self) -> None:
        """Note that a step of the loop has ended. Without any call, the whole context counts as one step."""
        self._count += 1
        end = perf_counter_ns()
        self._taken.add_step(self._count, self._begin, end)
        # The clock is read again, because the time of `add_step` does not belong to a step.
        self._begin = perf_counter_ns()

    def close(self) -> None:
        """Remove the wrappers around the calls of modules."""
        self._taken.close()

    def write(self, folder: Path) -> None:
        """Write the files on rank 0, and print the tables there. All ranks call this."""
        if not self._count:
            self.step()
        plan = self._plan
        if plan is not None:
            self._taken.set_plan(plan)
        report(current(), self._taken.finish(), folder, Console())


@contextmanager
def profile(
    folder: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    depth: int = 1,
    operators: bool = False,
) -> Iterator[LoopProfile]:
    """Profile the user's loop inside the context, then print tables and write the files of the profile.

    Call `step()` of the object at the end of each step of the loop. With several ranks, all ranks enter the
    context; rank 0 prints the times of the slowest rank, and writes those of all ranks and a trace of them on
    one clock. If the loop raises an error, nothing is written.

    Args:
        folder: the folder; made if missing.
        model: the model whose modules are timed; if not given, only kinds of work are timed.
        depth: levels of modules with separate rows below a block, such as its attention.
        operators: list the operators inside the modules too. This slows the loop down.

    Raises:
        ConfigError: if `model` is not a module, or `depth` not an integer from 0.
        RunError: if the folder cannot be written, or another profile is being taken.
    """
    if model is not None:
        refuse_no_module(model, where="profile")
    place = Path(folder)
    check_place(place, expected="a folder")  # now: a later error would lose the profile
    taken = LoopProfile(model, depth=depth, operators=operators)
    try:
        yield taken
    finally:
        taken.close()
    taken.write(place)
