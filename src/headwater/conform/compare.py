"""Comparison of a model's training in plain PyTorch with its streamed training under every plan."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from headwater.conform.child import PARTS, PLAIN, RANKS, Request
from headwater.conform.isolated import Run, run_child
from headwater.conform.plans import PLANS
from headwater.conform.ranks import TOLERANCES, rounded_difference
from headwater.conform.record import Shown, first_difference
from headwater.conform.report import CLOSE, DIFFERS, EQUAL, UNSTEADY, Entry, Report
from headwater.core.errors import ConfigError, HeadwaterError
from headwater.core.precision import PrecisionName

ALL_PLANS = (*PLANS, RANKS)
"""Names of the plans that a model can be compared under."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A model and the settings of its comparison.

    Attributes:
        target: the model; see `load_subject`.
        plans: names of plans.
        steps: number of steps.
        seed: seed of initial values and random numbers.
        precision: precision of the forwards; all but fp32 run under autocast.
        limit_s: seconds for each run.
        show: called with each entry as soon as it is known.
    """

    target: str
    plans: Sequence[str] = ALL_PLANS
    steps: int = 3
    seed: int = 0
    precision: PrecisionName = "fp32"
    limit_s: float = 600.0
    show: Callable[[Entry], None] = lambda entry: None

    def run(self) -> Report:
        """Compare, and return the report.

        Raises:
            HeadwaterError: if the model cannot be loaded.
        """
        with tempfile.TemporaryDirectory(prefix="headwater-conform-") as folder:
            return _Runs(self, Path(folder)).report()


class _Runs:
    """Runs one comparison: the model in plain PyTorch, and under each plan, in separate processes."""

    def __init__(self, comparison: Comparison, folder: Path) -> None:
        self._comparison = comparison
        self._folder = folder
        self._count = 0

    def report(self) -> Report:
        """Run the model plainly and under every plan, and return the report."""
        comparison = self._comparison
        quiet, watched = self._run(PLAIN, observed=False), self._run(PLAIN, observed=True)
        entries = [self._shown(_plain_entry(self._run(PLAIN, observed=True), watched, quiet))]
        if entries[0].passed:
            entries += [self._shown(self._entry(plan, quiet, watched)) for plan in comparison.plans]
        parameters = sum(
            value.numel()
            for name, value in watched.shown
            if name.startswith("initial value") and isinstance(value, torch.Tensor)
        )
        return Report(
            comparison.target,
            comparison.steps,
            comparison.seed,
            comparison.precision,
            parameters,
            _versions(),
            tuple(entries),
        )

    def _entry(self, plan: str, quiet: Run, watched: Run) -> Entry:
        """Run the model under one plan, and return its line of the report."""
        if plan == RANKS:
            return self._ranks_entry()
        values = 0
        for plain, observed in ((quiet, False), (watched, True)):
            run = self._run(plan, observed=observed)
            if run.status != "ok":
                return Entry(plan, run.status, run.message, trace=run.trace)
            difference = first_difference(plain.shown, run.shown)
            if difference is not None:
                detail = (
                    f"{difference}" if observed else f"{difference}, when only losses and outputs are read"
                )
                return Entry(plan, DIFFERS, detail)
            values += len(run.shown)
        return Entry(plan, EQUAL, values=values)

    def _ranks_entry(self) -> Entry:
        """Return the entry of two ranks, compared with plain PyTorch that divides each batch in two."""
        plain = self._run(PARTS, observed=False)
        if plain.status != "ok":
            return Entry(RANKS, plain.status, plain.message)
        run = self._run(RANKS, observed=False)
        if run.status != "ok":
            return Entry(RANKS, run.status, run.message, trace=run.trace)
        tolerance = TOLERANCES[self._comparison.precision]
        difference = rounded_difference(plain.shown, run.shown, tolerance)
        if difference is not None:
            return Entry(RANKS, DIFFERS, str(difference))
        return Entry(RANKS, CLOSE, f"losses differ by less than {tolerance}", values=len(run.shown))

    def _run(self, run: str, *, observed: bool) -> Run:
        """Run one request. An error while the model is loaded ends the comparison."""
        self._count += 1
        disk = self._folder / f"disk_{self._count}"
        disk.mkdir()
        comparison = self._comparison
        request = Request(
            comparison.target,
            run,
            comparison.steps,
            comparison.seed,
            observed,
            str(disk),
            str(self._folder / f"run_{self._count}.pt"),
            comparison.precision,
        )
        found = run_child(request, comparison.limit_s)
        if run == PLAIN and found.status == "refused":
            raise _refusal(found.message)
        return found

    def _shown(self, entry: Entry) -> Entry:
        self._comparison.show(entry)
        return entry


def _refusal(message: str) -> HeadwaterError:
    """Return the error that a child process reported as an exception of this process."""
    what, *more = message.splitlines()
    found = dict(line.strip().split(": ", 1) for line in more if ": " in line)
    return ConfigError(what, where=found.get("where"), remedy=found.get("remedy"))


def _plain_entry(again: Run, watched: Run, quiet: Run) -> Entry:
    """Return the entry of the plain run. A repeated run must be equal to it.

    Args:
        again: a repetition of `watched`.
        watched: the plain run in which all values are read in each step.
        quiet: the plain run in which only losses and outputs are read in each step.
    """
    for run in (quiet, watched, again):
        if run.status != "ok":
            return Entry(PLAIN, run.status, run.message, trace=run.trace)
    difference = first_difference(watched.shown, again.shown)
    if difference is not None:
        detail = f"{difference.name}: once {difference.plain}, once {difference.streamed}"
        return Entry(PLAIN, UNSTEADY, detail)
    losses = _losses(watched.shown)
    if losses != _losses(quiet.shown):
        return Entry(PLAIN, UNSTEADY, "losses change when gradients and parameters are read")
    return Entry(PLAIN, EQUAL, f"losses {', '.join(f'{loss:.6g}' for loss in losses)}", len(watched.shown))


def _losses(shown: list[Shown]) -> list[float]:
    """Return the losses among the values of a run."""
    return [float(value) for name, value in shown if name.endswith(": loss")]


def _versions() -> dict[str, str]:
    """Return the versions of Python and of those packages that a run may use."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("headwater", "torch", "numpy", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
