"""The history of a run: a line of JSON for each step and each evaluation, numbers exact to the bit."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from headwater.core.files import disk_errors
from headwater.trainer.callback import Callback, FitStart, StepEnd, ValidateEnd

_MAX_LINE_BYTES = 4096
"""The line of a step is shorter."""


class History(Callback):
    """Writes a file as the run goes on; what it holds beyond the step at which a run resumes is replaced.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def on_fit_start(self, event: FitStart) -> None:
        kept = [record for record in read_history(self._path) if record["step"] <= event.start_step]
        fresh = self._path.with_suffix(".partial")
        with disk_errors(self._path):
            fresh.write_text("".join(_line(record) for record in kept) if event.start_step else "")
            fresh.replace(self._path)
            self._file = self._path.open("a")

    def on_step_end(self, event: StepEnd) -> None:
        self._write({"kind": "train", **dataclasses.asdict(event)})

    def on_validate_end(self, event: ValidateEnd) -> None:
        self._write({"kind": "validate", **dataclasses.asdict(event)})

    def on_fit_end(self) -> None:
        if self._file is not None:
            with disk_errors(self._path):
                self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        assert self._file is not None, "a run starts before its first step"
        with disk_errors(self._path):
            self._file.write(_line(record))
            self._file.flush()


def read_last_steps(path: Path, count: int) -> list[StepEnd]:
    """The last steps in a history file, at most `count` of them, without reading all of a long one."""
    try:
        with path.open("rb") as file:
            begin = max(file.seek(0, os.SEEK_END) - count * _MAX_LINE_BYTES, 0)
            file.seek(begin)
            lines = file.read().decode(errors="replace").splitlines(keepends=True)
    except OSError:
        return []
    records = [json.loads(line) for line in lines[1 if begin else 0 :] if line.endswith("\n")]
    steps = [record for record in records if record.pop("kind") == "train"]
    return [StepEnd(**record) for record in steps[-count:]]


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record) + "\n"  # Python writes the shortest digits that give the same float again


def read_history(path: Path) -> Iterator[dict[str, Any]]:
    """The records in a history file; none if it does not exist. A line cut off by a kill is left out."""
    if not path.exists():
        return
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)
