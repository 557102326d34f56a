"""The interface between a run and a service that keeps runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

Status = Literal["complete", "stopped", "failed"]


@dataclasses.dataclass(frozen=True)
class Record:
    """Numbers of a step or an evaluation.

    Attributes:
        step: steps done.
        time: when they were measured, in seconds since 1970.
        values: the numbers, by name.
    """

    step: int
    time: float
    values: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Summary:
    """The end of a run.

    Attributes:
        status: `complete` after its last step, `stopped` before, `failed` after an error.
        values: the last numbers, by name.
    """

    status: Status
    values: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Opening:
    """The description of a run that a service opens.

    Attributes:
        folder: the model_dir.
        params: the params as resolved.
        continued: identifier of the earlier run of the service to continue; `None` for a new run.
    """

    folder: Path
    params: Mapping[str, Any]
    continued: str | None


class ServiceRun(Protocol):
    """Interface: an open run of a service."""

    @property
    def identifier(self) -> str:
        """The identifier with which a later process continues the run."""
        ...

    @property
    def place(self) -> str:
        """The address, folder or name by which the user finds the run."""
        ...

    def log(self, records: Sequence[Record]) -> None:
        """Send numbers."""
        ...

    def finish(self, summary: Summary) -> None:
        """Send the summary and close the run."""
        ...


OpenRun = Callable[[Opening], ServiceRun]
"""Opens a run. It raises a `ConfigError` if settings are wrong, and other exceptions for other errors."""


def flat(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested params with one key each, such as `trainer.init.schedulers.0.LinearLR.total_iters`."""
    found: dict[str, Any] = {}
    for key, value in params.items():
        entries: Any = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        if isinstance(entries, Mapping) and entries:
            found |= {f"{key}.{name}": each for name, each in flat(entries).items()}
        else:
            found[str(key)] = value
    return found
