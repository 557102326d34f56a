"""Reading of history files while runs write them, with little memory and no line read twice."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, final

import numpy as np

from headwater.board.digest import Digest, Floats, Ints
from headwater.trainer.history import StepNumbers, record_numbers, record_of, step_numbers

_BLOCK = 1 << 18
_LONGEST_LINE = 1 << 16
_USUAL_BYTES = 2048
"""Bytes that usually contain the end of a line and the whole line after it."""
_KEPT_END = 4096
"""Bytes before the reading position that are compared with what was read, to notice a rewritten file."""
_VALIDATIONS, _LAST_STEPS = 500, 20


class Lines(NamedTuple):
    """The contents of some lines of a history.

    Attributes:
        steps: the steps.
        validations: the records of evaluations.
        damaged: number of lines that could not be read.
    """

    steps: list[StepNumbers]
    validations: Sequence[Mapping[str, Any]]
    damaged: int


def parse(lines: Iterable[bytes]) -> Lines:
    """Return the contents of lines of a history."""
    steps, validations, damaged = [], [], 0
    for line in lines:
        found = step_numbers(line)
        record = record_of(line) if found is None else None
        if record is not None:
            found = record_numbers(record)
        if found is not None:
            steps.append(found)
        elif record is not None and record["kind"] == "validate":
            validations.append(record)
        else:
            damaged += 1
    return Lines(steps, validations, damaged)


def series(steps: list[StepNumbers]) -> tuple[Ints, Floats]:
    """Return the numbers of n steps, [n], and the values of their series, [series, n]."""
    numbers = np.array([step[:8] for step in steps], np.float64).reshape(-1, 8).T
    duration = np.where(numbers[4] > 0, numbers[4], np.nan)
    rate = np.where(numbers[6] > 0, numbers[6], numbers[7]) / duration
    memory = np.where(numbers[5] > 0, numbers[5], np.nan)
    values = np.stack([numbers[1], numbers[2], numbers[3], rate, memory])
    return numbers[0].astype(np.int64), values


def _line_after(file: BinaryIO, position: int) -> bytes:
    """Return the first line that begins after a position."""
    # One read of a few lines: a buffered file would drop its buffer at each `seek`, and read far more.
    block = os.pread(file.fileno(), _USUAL_BYTES, position)
    begin = block.find(b"\n") + 1
    end = block.find(b"\n", begin) + 1
    if begin and end:
        return block[begin:end]
    file.seek(position)
    file.readline(_LONGEST_LINE)  # the rest of the line in which reading began
    return file.readline(_LONGEST_LINE)


@final
class HistoryReader:
    """Follows one history file. All of its steps are in the digest, and a few records are kept.

    A file that was replaced or shortened, as by a run that resumes from an earlier checkpoint, is read again
    from its beginning. One thread reads; other threads hold `lock` to get fields that belong together.

    Attributes:
        lock: held while fields change, but not while lines are read and parsed.
        digest: the series of the run.
        validations: the newest records of evaluations.
        steps: the newest steps.
        damaged: number of lines that could not be read.
        size: bytes of the file when it was last read.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lock = threading.Lock()
        self._begin(0)

    @property
    def read_share(self) -> float:
        """The part of the file that was read, from 0 to 1."""
        return self._position / self.size if self.size else 1.0

    def sample(self, count: int) -> None:
        """Read up to `count` lines that are spread over the file, and the last lines.

        The digest then shows the run roughly, and `steps` has the newest steps. `advance` reads all lines; it
        adds these again to the digest, which does not change a least or greatest value.

        Raises:
            OSError: if the file cannot be read.
        """
        with self._path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= _BLOCK:
                return  # `advance` reads such a small file at once
            lines = []
            for index in range(count):
                lines.append(_line_after(file, size * index // count))
            file.seek(size - _LONGEST_LINE)
            end = file.read(_LONGEST_LINE).splitlines(keepends=True)[1:]
        newest = parse(end).steps
        sampled = series([found for line in lines if (found := step_numbers(line)) is not None] + newest)
        with self.lock:
            self.size = self._sampled = size
            self.digest.add(*sampled)
            self.steps.extend(newest[-_LAST_STEPS:])

    def advance(self, most_bytes: int) -> bool:
        """Read up to `most_bytes` that were not read before. Return true if anything has changed.

        Raises:
            OSError: if the file cannot be read.
        """
        with self._path.open("rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            restarted = not self._is_continued(file)
            if restarted:
                with self.lock:
                    self._begin(self.size)
            begin = self._position
            file.seek(begin)
            while self._position - begin < most_bytes and self._take(file.read(_BLOCK)):
                file.seek(self._position)
        return restarted or self._position > begin

    def _begin(self, size: int) -> None:
        self.digest = Digest()
        self.validations: deque[Mapping[str, Any]] = deque(maxlen=_VALIDATIONS)
        self.steps: deque[StepNumbers] = deque(maxlen=_LAST_STEPS)
        self.damaged = 0
        self.size = size
        self._sampled = 0  # until reading comes to this position, `steps` are those of `sample`
        self._position = 0
        self._end = b""

    def _is_continued(self, file: BinaryIO) -> bool:
        """True if the bytes before the position are those that were read."""
        if self.size < self._position:
            return False
        file.seek(self._position - len(self._end))
        return file.read(len(self._end)) == self._end

    def _take(self, block: bytes) -> bool:
        """Read the whole lines of a block; return false if it ends within its first line."""
        length = block.rfind(b"\n") + 1
        if not length and len(block) < _LONGEST_LINE:
            return False  # the run is still writing the line
        found = parse(block[:length].splitlines(keepends=True)) if length else Lines([], [], 1)
        steps, values = series(found.steps)
        length = length or len(block)
        with self.lock:
            self.digest.add(steps, values)
            self.validations.extend(found.validations)
            self.damaged += found.damaged
            self._keep_steps(found.steps, self._position + length)
            self._position += length
        self._end = block[max(0, length - _KEPT_END) : length]
        return True

    def _keep_steps(self, steps: list[StepNumbers], end: int) -> None:
        """Keep the newest of the steps that end at a position, unless those of `sample` are newer."""
        if end < self._sampled:
            return
        if self._position < self._sampled:
            self.steps.clear()
        self.steps.extend(steps[-_LAST_STEPS:])
