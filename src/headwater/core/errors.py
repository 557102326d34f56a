"""Every exception that Headwater raises for something a user can cause.

    HeadwaterError
    ├── ConfigError            a params file, command line or argument is wrong
    ├── DataError              an input file is missing, malformed or does not fit the model
    ├── ModelError             a model, its loss, its optimizer and its batch do not fit together
    ├── PlanError              no plan can be made for this model on this machine
    │   └── DoesNotFitError    a budget is too small; names the tier and the nearest setting that fits
    ├── StoreError             the weight store failed
    │   ├── DiskFullError      the disk tier or a checkpoint ran out of space
    │   ├── DeviceFullError    a GPU has no memory for an update, which waits; nothing is lost
    │   └── CorruptError       bytes on disk are not the bytes that were written
    ├── StreamError            the executor failed
    │   └── NonFiniteError     a loss or gradient is NaN or infinite
    ├── CheckpointError        a checkpoint is missing, incomplete, damaged or of another shape
    ├── RankError              a rank is lost, or keeps the others waiting
    ├── QueueError             the job queue cannot do what was requested
    └── RunError               a run cannot start or continue
        └── ModelDirBusyError  another run works in the same model_dir

An error states the fault, its place, and a remedy.
"""

from __future__ import annotations


class HeadwaterError(Exception):
    """Base of all errors of this package.

    Args:
        what: the fault, one sentence without a full stop.
        where: its place: a file, key, stage or step.
        remedy: an action of the user that helps.
    """

    def __init__(self, what: str, *, where: str | None = None, remedy: str | None = None) -> None:
        self.what = shorten(what, _LONGEST)
        self.where = where and shorten(where, _LONGEST)
        self.remedy = remedy and shorten(remedy, _LONGEST)
        lines = [self.what]
        if where:
            lines.append(f"  where: {self.where}")
        if remedy:
            lines.append(f"  remedy: {self.remedy}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.remedy))


FROM_WEIGHTS = (
    "start a new run (with another model_dir) from the weights of the checkpoint: checkpoint_path, and the "
    "callback LoadCheckpointStates: {load_checkpoint_states: model}"
)
"""Remedy for a checkpoint with which a run cannot continue."""

_LONGEST = 4000
"""Maximum characters of each part of a message. A part may quote a file with any content."""


def shorten(text: str, longest: int) -> str:
    """Return `text`; if it has more than `longest` characters, an ellipsis replaces its middle."""
    if len(text) <= longest:
        return text
    head = longest * 2 // 3
    return f"{text[:head]}…{text[len(text) - (longest - head - 1) :]}"


def error_class(name: object) -> type[HeadwaterError] | None:
    """Return the error class called `name`, or `None`. Used to raise errors of other processes again."""
    found = globals().get(name) if isinstance(name, str) else None
    return found if isinstance(found, type) and issubclass(found, HeadwaterError) else None


def _rebuild(cls: type[HeadwaterError], what: str, where: str | None, remedy: str | None) -> HeadwaterError:
    return cls(what, where=where, remedy=remedy)


class ConfigError(HeadwaterError):
    """A params file, command line or argument is wrong."""


class DataError(HeadwaterError):
    """Input data are missing, malformed or do not fit the model."""


class ModelError(HeadwaterError):
    """A model, its loss, its optimizer and its batch do not fit together."""


class PlanError(HeadwaterError):
    """No plan can be made for this model on this machine."""


class DoesNotFitError(PlanError):
    """A budget is too small for the model."""


class StoreError(HeadwaterError):
    """The weight store cannot read a value or apply an update, for example after a failed update."""


class DiskFullError(StoreError):
    """The disk tier or a checkpoint ran out of space."""


class DeviceFullError(StoreError):
    """A GPU has no memory to update a stage. The update waits, and the next use of the stage completes it."""


class CorruptError(StoreError):
    """Bytes on disk are not the bytes that were written."""


class StreamError(HeadwaterError):
    """Weights cannot be streamed in this situation, or a program uses a streamed model in a wrong way."""


class NonFiniteError(StreamError):
    """A loss or gradient is NaN or infinite."""


class CheckpointError(HeadwaterError):
    """A checkpoint is missing, incomplete, damaged or of another shape."""


class RankError(HeadwaterError):
    """A rank is lost, or keeps the others waiting."""


class QueueError(HeadwaterError):
    """The job queue cannot do what was requested."""


class RunError(HeadwaterError):
    """A run cannot start or continue."""


class ModelDirBusyError(RunError):
    """Another run works in the same model_dir."""
