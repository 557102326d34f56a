"""The data types of the queue: jobs, with their phases and priorities, and submissions."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from headwater.core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?")
_VALUE = re.compile(r"[A-Za-z0-9._/:@+-]{0,200}")


class Phase(StrEnum):
    """The phases of a job's life."""

    CREATED = "CREATED"
    """Recorded, but not yet seen by the supervisor."""
    QUEUED = "QUEUED"
    """Waiting for CSXs."""
    INITIALIZING = "INITIALIZING"
    """Has CSXs; its process is being started."""
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def over(self) -> bool:
        """True for the final phases."""
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED)


class Priority(StrEnum):
    """The priority of a job: `p1` before `p2` before `p3`."""

    P1 = "p1"
    P2 = "p2"
    P3 = "p3"


_KINDS: dict[str, Callable[[Any], Any]] = {
    "command": tuple,
    "systems": tuple,
    "folder": Path,
    "model_dir": Path,
    "log": Path,
    "priority": Priority,
    "phase": Phase,
}
"""Attribute -> how to convert it, for the attributes whose types JSON does not have."""

_SUBMISSION: dict[str, tuple[type, ...]] = {
    "command": (list, tuple),
    "folder": (str,),
    "environment": (dict,),
    "num_csx": (int,),
    "model_dir": (str, type(None)),
    "priority": (str, Priority),
    "labels": (dict,),
    "umask": (int,),
}
"""Types of the fields of a submission in JSON."""

_MAX_UMASK = 0o777

SAME_VERSION = "send requests with the command headwater of the version that serves the queue"
"""Remedy of a malformed request, which a command of the same version never sends."""


def ending(exit_code: int) -> str:
    """Return a text that says how a process ended; a negative code is the signal that killed it."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"ended by {signal.Signals(-exit_code).name}"
    except ValueError:  # most real-time signals have no name
        return f"ended by signal {-exit_code}"


def read_priority(text: str) -> Priority:
    """Return the priority named `text`.

    Raises:
        ConfigError: if the name is unknown.
    """
    try:
        return Priority(text)
    except ValueError:
        raise ConfigError(
            f"unknown priority {text!r}",
            where="priority of the job",
            remedy=f"write one of {', '.join(Priority)}",
        ) from None


def read_labels(words: Sequence[str]) -> dict[str, str]:
    """Parse labels, each written as `name=value`.

    Raises:
        ConfigError: if a word does not have this form.
    """
    labels = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (equals and _NAME.fullmatch(name) and _VALUE.fullmatch(value)):
            raise ConfigError(
                f"expected a label name=value, got {word!r}",
                where="labels of the job",
                remedy="use letters, digits, - and _ in a name; in a value also . / : @ +",
            )
        labels[name] = value
    return labels


def read_label_changes(words: Sequence[str]) -> dict[str, str | None]:
    """Parse changes of labels: `name=value` sets a label, `name-` removes it (value `None`).

    Raises:
        ConfigError: if a word does not have one of these forms.
    """
    changes: dict[str, str | None] = {}
    for word in words:
        if word.endswith("-") and "=" not in word:
            changes[word.removesuffix("-")] = None
        else:
            changes.update(read_labels([word]))
    return changes


@dataclasses.dataclass(frozen=True)
class Submission:
    """A request to run a job.

    Attributes:
        command: program and arguments.
        folder: working directory; absolute.
        environment: environment variables. They are erased when the job ends.
        num_csx: number of CSXs that the job needs at the same time.
        model_dir: folder for the job's artifacts and log; absolute. Only one unfinished job may use it.
        priority: priority of the job.
        labels: the user's labels.
        umask: file mode creation mask of the job's process.

    Raises:
        ConfigError: if a value has the wrong type or is out of range.
    """

    command: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    num_csx: int = 1
    model_dir: Path | None = None
    priority: Priority = Priority.P2
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    umask: int = 0o022

    def __post_init__(self) -> None:
        if not self.command or not self.command[0]:
            raise ConfigError("the command of the job is empty", remedy="write a command")
        if not (self.folder.is_absolute() and (self.model_dir is None or self.model_dir.is_absolute())):
            raise ConfigError(
                f"expected absolute paths, got folder {self.folder} and model_dir {self.model_dir}",
                remedy="write absolute paths",
            )
        paths = (str(self.folder), str(self.model_dir or ""))
        words = (*self.command, *self.environment, *self.environment.values(), *paths)
        if not all(isinstance(word, str) and "\0" not in word for word in words):
            raise ConfigError(
                "expected command, environment and folders of a job to be strings without null characters",
                remedy="remove the null characters",
            )
        if not all(_is_utf8(path) for path in paths):
            raise ConfigError(
                f"expected names of folders in UTF-8, got {paths[0]!a} and {paths[1]!a}",
                remedy="rename the folder",
            )
        if not (isinstance(self.num_csx, int) and isinstance(self.umask, int)):
            raise ConfigError(
                f"expected integers, got num_csx {self.num_csx!r} and umask {self.umask!r}",
                remedy="write integers",
            )
        if not 0 <= self.umask <= _MAX_UMASK:
            raise ConfigError(
                f"expected a umask of 0 to {_MAX_UMASK:#o}, got {self.umask:#o}",
                remedy="write 0o077, for example",
            )
        read_labels([f"{name}={value}" for name, value in self.labels.items()])

    def to_record(self) -> dict[str, Any]:
        """Return the fields as values that JSON can represent."""
        return _to_record(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Return the submission from a return value of `to_record`; `record` is checked completely.

        Raises:
            ConfigError: if `record` is not such a value.
        """
        given = read_fields(record, _SUBMISSION, "the submission")
        texts = [*given["command"], *given["environment"].values(), *given["labels"].values()]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(
                "expected strings in command, environment and labels, got another type",
                where="the submission",
                remedy=SAME_VERSION,
            )
        return cls(**_from_record({**given, "priority": read_priority(given["priority"])}))


@dataclasses.dataclass(frozen=True)
class Job:
    """A job in the queue.

    Attributes:
        name: unique name.
        user: owner of the job.
        command: program and arguments.
        folder: working directory.
        num_csx: number of its CSXs.
        model_dir: folder for its artifacts.
        priority: its priority.
        labels: the user's labels.
        phase: its current phase.
        reason: why it failed, was cancelled or waits.
        exit_code: exit code of its process; negative if a signal killed it.
        systems: names of the CSXs that it has or had.
        log: file with its output.
        created: time of the submission, in seconds since 1970.
        started: time at which its process was started.
        ended: time of its end.
    """

    name: str
    user: str
    command: tuple[str, ...]
    folder: Path
    num_csx: int
    model_dir: Path | None
    priority: Priority
    labels: Mapping[str, str]
    phase: Phase
    reason: str | None
    exit_code: int | None
    systems: tuple[str, ...]
    log: Path
    created: float
    started: float | None
    ended: float | None

    def to_record(self) -> dict[str, Any]:
        """Return the fields as values that JSON can represent."""
        return _to_record(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Return the job from a return value of `to_record`."""
        return cls(**_from_record(record))


def read_fields(record: object, fields: Mapping[str, tuple[type, ...]], where: str) -> dict[str, Any]:
    """Return a copy of `record` after checking its fields.

    Args:
        record: a value that another process has sent.
        fields: the names of the expected fields, with their types. A bool is not accepted for an int.
        where: place for the error.

    Raises:
        ConfigError: if `record` is not a mapping, or a field is missing, unknown or of another type.
    """
    if not isinstance(record, Mapping):
        raise ConfigError(
            f"expected an object with the fields {', '.join(fields)}, got a {type(record).__name__}",
            where=where,
            remedy=SAME_VERSION,
        )
    for name in sorted(fields.keys() ^ record.keys()):
        problem = "is missing" if name in fields else "is unknown"
        raise ConfigError(
            f"the field {name!r} {problem}; expected {', '.join(fields) or 'no fields'}",
            where=where,
            remedy=SAME_VERSION,
        )
    for name, types in fields.items():
        if type(record[name]) not in types:
            expected = " or ".join(kind.__name__ for kind in types)
            raise ConfigError(
                f"expected {expected} for {name!r}, got {type(record[name]).__name__}",
                where=where,
                remedy=SAME_VERSION,
            )
    return dict(record)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _to_record(value: Submission | Job) -> dict[str, Any]:
    return {key: str(item) if isinstance(item, Path) else item for key, item in vars(value).items()}


def _from_record(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value if value is None else _KINDS.get(key, lambda same: same)(value)
        for key, value in record.items()
    }
