"""What the queue is about: jobs, their phases and priorities, and who asks for what."""

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
    """Where a job is in its life."""

    CREATED = "CREATED"
    """Recorded, and not yet seen by whoever gives out CSXs."""
    QUEUED = "QUEUED"
    """It waits for CSXs."""
    INITIALIZING = "INITIALIZING"
    """It has CSXs, and its process is being started."""
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def over(self) -> bool:
        """Whether nothing will change any more."""
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED)


class Priority(StrEnum):
    """`p1` comes before `p2`, and that before `p3`."""

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
"""What JSON does not have, by attribute."""

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
"""Types of the fields of a submission, as JSON has them."""

_MAX_UMASK = 0o777


def ending(exit_code: int) -> str:
    """How a process ended, in words."""
    if exit_code < 0:
        return f"ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def read_priority(text: str) -> Priority:
    """The priority of that name.

    Raises:
        ConfigError: if there is none.
    """
    try:
        return Priority(text)
    except ValueError:
        raise ConfigError(f"{text!r} is no priority", remedy=f"write one of {', '.join(Priority)}") from None


def read_labels(words: Sequence[str]) -> dict[str, str]:
    """Labels from `name=value` each.

    Raises:
        ConfigError: if a word is nothing of the kind.
    """
    labels = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (equals and _NAME.fullmatch(name) and _VALUE.fullmatch(value)):
            raise ConfigError(
                f"{word!r} is no label",
                remedy="write name=value; a name has letters, digits, - and _, a value also . / : @ +",
            )
        labels[name] = value
    return labels


def read_label_changes(words: Sequence[str]) -> dict[str, str | None]:
    """Likewise; `name-` stands for a label that goes away, and is `None`."""
    changes: dict[str, str | None] = {}
    for word in words:
        if word.endswith("-") and "=" not in word:
            changes[word.removesuffix("-")] = None
        else:
            changes.update(read_labels([word]))
    return changes


@dataclasses.dataclass(frozen=True)
class Submission:
    """A job as somebody asks for it.

    Attributes:
        command: program and arguments.
        folder: in which it runs; absolute.
        environment: with which it runs; nobody but the job sees it again.
        num_csx: CSXs that it takes, all at once.
        model_dir: where its artifacts and its log go; absolute. One job at a time has a model_dir.
        priority: what comes first.
        labels: whatever the user wants to find it by.
        umask: with which it makes files.

    Raises:
        ConfigError: if something in it is not what it must be.
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
            raise ConfigError("there is nothing to run", remedy="write a command")
        if not (self.folder.is_absolute() and (self.model_dir is None or self.model_dir.is_absolute())):
            raise ConfigError("folder and model_dir of a job are absolute paths")
        paths = (str(self.folder), str(self.model_dir or ""))
        words = (*self.command, *self.environment, *self.environment.values(), *paths)
        if not all(isinstance(word, str) and "\0" not in word for word in words):
            raise ConfigError("command, environment and folders of a job are texts without zero bytes")
        if not all(_is_utf8(path) for path in paths):
            raise ConfigError(
                f"expected names of folders in UTF-8, got {paths[0]!a} and {paths[1]!a}",
                remedy="rename the folder",
            )
        if not (isinstance(self.num_csx, int) and isinstance(self.umask, int)):
            raise ConfigError("num_csx and umask of a job are whole numbers")
        if not 0 <= self.umask <= _MAX_UMASK:
            raise ConfigError(f"expected a umask of 0 to {_MAX_UMASK:#o}, got {self.umask}")
        read_labels([f"{name}={value}" for name, value in self.labels.items()])

    def to_record(self) -> dict[str, Any]:
        """As JSON has it."""
        return _to_record(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Return the submission that `to_record` wrote; `record` may come from anywhere.

        Raises:
            ConfigError: if it is not such a record.
        """
        given = read_fields(record, _SUBMISSION, "the submission")
        texts = [*given["command"], *given["environment"].values(), *given["labels"].values()]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError("command, environment and labels of a job are texts")
        return cls(**_from_record({**given, "priority": read_priority(given["priority"])}))


@dataclasses.dataclass(frozen=True)
class Job:
    """A job as the queue knows it.

    Attributes:
        name: by which it is asked for.
        user: whose it is.
        command: program and arguments.
        folder: in which it runs.
        num_csx: CSXs that it takes.
        model_dir: where its artifacts go.
        priority: what comes first.
        labels: the user's own.
        phase: where it is.
        reason: why it failed or was cancelled, or what it waits for.
        exit_code: of its process; negative for the signal that ended it.
        systems: names of the CSXs that it has or had.
        log: what it prints.
        created: when it was submitted, in seconds since 1970.
        started: when its process was started.
        ended: when it was over.
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
        """As JSON has it."""
        return _to_record(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """What `to_record` gave."""
        return cls(**_from_record(record))


def read_fields(
    record: Mapping[str, Any], fields: Mapping[str, tuple[type, ...]], where: str
) -> dict[str, Any]:
    """Return `record` if it has exactly these fields, each of one of its types.

    Raises:
        ConfigError: if it has others, or a value has another type. A bool is not a number here.
    """
    for name in fields.keys() ^ record.keys():
        problem = "is missing" if name in fields else "is unknown"
        raise ConfigError(
            f"the field {name!r} {problem}; expected {', '.join(fields) or 'no fields'}", where=where
        )
    for name, types in fields.items():
        if type(record[name]) not in types:
            expected = " or ".join(kind.__name__ for kind in types)
            raise ConfigError(
                f"expected {expected} for {name!r}, got {type(record[name]).__name__}", where=where
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
