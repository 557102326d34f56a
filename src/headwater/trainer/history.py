"""History of a run: a line of JSON for each step and each evaluation, with exact numbers."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from headwater.core.files import disk_errors, replace_file
from headwater.trainer.callback import Callback, FitStart, StepEnd, ValidateEnd

logger = logging.getLogger(__name__)

_MAX_LINE_BYTES = 4096
"""Maximum number of bytes of a step's line."""

_STEP_FIELDS = dataclasses.fields(StepEnd)

# At most 15 digits, so that a damaged line is never read as a number that floats cannot represent exactly.
_STEP_LINE = re.compile(
    rb'\{"kind": "train", "step": (\d{1,15}), "loss": ([^,]+), "learning_rate": ([^,]+), '
    rb'"gradient_norm": ([^,]+), "applied": \w+, "loss_scale": [^,]+, "tokens": (\d{1,15}), '
    rb'"step_s": ([^,]+), [^{}]*"memory_bytes": (\d{1,15}), "samples": (\d{1,15}), "busy_s": [ -~]*\}\n'
)
"""The line that `History` writes for a step."""


class History(Callback):
    """Appends a line for each step and evaluation. A run that resumes first removes lines of later steps.

    All lines up to a checkpoint's step are on disk soon after `on_checkpoint`.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def on_fit_start(self, event: FitStart) -> None:
        # Lines after the checkpoint are of steps that this run computes again.
        records = read_history(self._path) if event.start_step else ()
        kept = "".join(_line(record) for record in records if record["step"] <= event.start_step).encode()
        with disk_errors(self._path):
            if not self._path.is_file() or self._path.read_bytes() != kept:
                replace_file(self._path, kept)
            self._file = self._path.open("a")

    def on_step_end(self, event: StepEnd) -> None:
        self._write({"kind": "train", **dataclasses.asdict(event)})

    def on_validate_end(self, event: ValidateEnd) -> None:
        self._write({"kind": "validate", **dataclasses.asdict(event)})

    def on_checkpoint(self, step: int, path: Path) -> None:
        if self._file is not None:
            with disk_errors(self._path):
                os.fsync(self._file.fileno())

    def on_fit_end(self) -> None:
        if self._file is not None:
            with disk_errors(self._path), self._file as file:
                os.fsync(file.fileno())

    def _write(self, record: dict[str, Any]) -> None:
        assert self._file is not None, "a run starts before its first step"
        with disk_errors(self._path):
            self._file.write(_line(record))
            self._file.flush()


class StepNumbers(NamedTuple):
    """The numbers of a step that charts show.

    Attributes:
        step: number of the step, from 1.
        loss: its loss.
        learning_rate: its learning rate.
        gradient_norm: 2-norm of its gradient before clipping.
        step_s: its duration in seconds.
        memory_bytes: resident host memory of the process; 0 in histories of earlier versions.
        tokens: tokens in its batch; 0 without `input_ids`.
        samples: samples in its batch.
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    step_s: float
    memory_bytes: int
    tokens: int
    samples: int

    @property
    def unit(self) -> str:
        """The unit of `rate`: tokens, or samples if the batch has no tokens."""
        return "tokens" if self.tokens else "samples"

    @property
    def rate(self) -> float:
        """Tokens or samples per second; NaN for a step without duration."""
        return (self.tokens or self.samples) / self.step_s if self.step_s > 0 else math.nan


def step_numbers(line: bytes) -> StepNumbers | None:
    """Return the numbers of a step from its line, several times faster than `record_of`.

    Returns:
        `None` if `History` of this version did not write the line for a step; `record_of` may still read it.
    """
    found = _STEP_LINE.fullmatch(line)
    if found is None:
        return None
    step, loss, rate, norm, tokens, step_s, memory, samples = found.groups()
    try:
        return StepNumbers(
            int(step),
            float(loss),
            float(rate),
            float(norm),
            float(step_s),
            int(memory),
            int(tokens),
            int(samples),
        )
    except ValueError:
        return None


def record_numbers(record: dict[str, Any]) -> StepNumbers | None:
    """Return the numbers of a step from its record; `None` for an evaluation, or if a number is missing."""
    if record["kind"] != "train" or not 1 <= record["step"] < 10**15:
        return None
    try:
        loss, rate, norm, step_s = (float(record[key]) for key in StepNumbers._fields[1:5])
        memory, tokens, samples = (int(record.get(key, 0)) for key in StepNumbers._fields[5:])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if max(memory, tokens, samples) >= 10**15:  # no run counts so far: the line is damaged
        return None
    return StepNumbers(record["step"], loss, rate, norm, step_s, memory, tokens, samples)


def read_last_steps(path: Path, count: int) -> list[StepEnd]:
    """Return the last `count` steps in a history file, without reading all of a long one."""
    try:
        with path.open("rb") as file:
            begin = max(file.seek(0, os.SEEK_END) - count * _MAX_LINE_BYTES, 0)
            file.seek(begin)
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return []
    # Reading may begin within a line, so the first one is left out.
    records = (record for line in lines[1 if begin else 0 :] if (record := record_of(line)) is not None)
    steps = [step for record in records if (step := _step(record)) is not None]
    return steps[-count:]


def read_history(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records in a history file; nothing if the file does not exist.

    A line cut off by a kill is left out. Lines damaged by a loss of power are left out with a warning.
    """
    if not path.exists():
        return
    with disk_errors(path):
        lines = path.read_bytes().splitlines(keepends=True)
    damaged = 0
    for line in lines:
        record = record_of(line)
        if record is not None:
            yield record
        # After a loss of power a line may be zeros: the disk had the file's new length, but not its bytes.
        elif line.endswith(b"\n") or b"\0" in line:
            damaged += 1
    if damaged:
        logger.warning("%s: %d damaged lines are left out; a loss of power can cause this", path, damaged)


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"  # Python writes the shortest digits that read as the same float


def record_of(line: bytes) -> dict[str, Any] | None:
    """Return the record on a line of a history; `None` if the line is cut off or damaged."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    whole = line.endswith(b"\n") and isinstance(record, dict) and {"kind", "loss"} <= record.keys()
    return record if whole and isinstance(record.get("step"), int) else None


def _step(record: dict[str, Any]) -> StepEnd | None:
    """Return the step that a record describes; `None` for an evaluation."""
    known = {field.name: record[field.name] for field in _STEP_FIELDS if field.name in record}
    needed = {field.name for field in _STEP_FIELDS if field.default is dataclasses.MISSING}
    return StepEnd(**known) if record["kind"] == "train" and known.keys() >= needed else None
