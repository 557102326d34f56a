"""Runs a random program in plain PyTorch, or with its model streamed."""

from __future__ import annotations

import dataclasses
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headwater
from headwater.api.references import StaleTensorWarning
from headwater.conform.plans import with_enough_slabs
from headwater.conform.record import Shown, settled
from headwater.core.errors import HeadwaterError
from headwater.plan.known_traces import KnownTraces


@dataclasses.dataclass(frozen=True)
class Ran:
    """A run that ended without an exception.

    Attributes:
        shown: the values that it recorded.
        warning: the message that tensors do not follow their weights; empty without such a warning.
    """

    shown: list[Shown]
    warning: str = ""


@dataclasses.dataclass(frozen=True)
class Failed:
    """A run that an exception ended.

    Attributes:
        kind: name of the exception's class.
        message: the first line of its message.
        refused: True if it is one of the project's own errors.
        place: the innermost line of this package that it passed; empty if it passed no line.
    """

    kind: str
    message: str
    refused: bool
    place: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" + (f" [{self.place}]" if self.place else "")


def run_plain(source: str) -> Ran | Failed:
    """Run a program in plain PyTorch."""
    return _run(source, lambda model: model)


def run_streamed(source: str, plan: str, traces: KnownTraces) -> Ran | Failed:
    """Run a program with its model compiled for a plan, with the fewest slabs that are accepted.

    Args:
        source: source of the program.
        plan: name of the plan.
        traces: the traces of this program; dry runs of an earlier run are not repeated.
    """

    def run(options: Mapping[str, Any]) -> Ran | Failed:
        with traces.in_use():
            return _run_compiled(source, options)

    with tempfile.TemporaryDirectory(prefix="conform-") as folder:
        try:
            return with_enough_slabs(plan, Path(folder), run)
        except HeadwaterError as error:
            return _failure(error)


def _run_compiled(source: str, options: Mapping[str, Any]) -> Ran | Failed:
    """Run a program with its model compiled for a backend that has these options.

    Raises:
        HeadwaterError: if the run is refused.
    """
    compiled: list[nn.Module] = []

    def compile_model(model: nn.Module) -> nn.Module:
        compiled.append(model)
        return headwater.compile(model, headwater.backend("CSX", **options))

    # If the run has failed, its error is the finding, not one of the releases after it.
    ran = _run(source, compile_model)
    try:
        for model in compiled:
            headwater.release(model)
    except HeadwaterError:
        if isinstance(ran, Ran):
            raise
    except Exception as error:  # noqa: BLE001 - any error is a finding
        if isinstance(ran, Ran):
            return _failure(error)
    return ran


def _run(source: str, compile_model: Callable[[nn.Module], nn.Module]) -> Ran | Failed:
    """Run a program.

    Raises:
        HeadwaterError: if the run is refused.
    """
    shown: list[Shown] = []
    namespace: dict[str, Any] = {"__name__": "program"}
    try:
        with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng(devices=[]):
            # In this order: the filter that is set last is tried first.
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", StaleTensorWarning)
            exec(compile(source, "program.py", "exec"), namespace)
            namespace["run"](compile_model, lambda name, value: shown.append((name, settled(value))))
    except HeadwaterError:
        raise
    except Exception as error:  # noqa: BLE001 - any error is a finding
        return _failure(error)
    finally:
        # The program's functions refer to it: the model would stay in memory until a garbage collection.
        namespace.clear()
    return Ran(shown, next((str(each.message) for each in caught), ""))


def _failure(error: Exception) -> Failed:
    """Return an exception's class, first line and place."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/headwater/" in frame.filename]
    own = [frame for frame in frames if "/headwater/conform/" not in frame.filename]
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno} {own[-1].name}" if own else ""
    message = (str(error).strip() or "no message").splitlines()[0]
    return Failed(type(error).__name__, message[:300], isinstance(error, HeadwaterError), place)
