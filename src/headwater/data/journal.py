"""How far the first pass of a preparation has come, so that a killed one goes on from there."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headwater.data.examples import Block

_INTERVAL_S = 1.0


@dataclasses.dataclass
class Progress:
    """What the tasks that are done have made.

    Attributes:
        tasks: number of them.
        values: numbers in the file of values.
        examples: in the file of lengths.
        rows: of an example.
        token_counts: how often each token occurs, [vocab_size].
        counts: what happened to texts and records.
    """

    tasks: int
    values: int
    examples: int
    rows: int
    token_counts: npt.NDArray[np.int64]
    counts: collections.Counter[str]


class Corpus:
    """The files of values and lengths of all examples, extended task by task.

    Opened anew, they end where the journal was last written.

    Args:
        folder: where they are.
        vocab_size: one more than the largest token.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.values_path, self._lengths_path = folder / "tokens.bin", folder / "lengths.bin"
        self._journal = folder / "journal.json"
        self.progress = Progress(0, 0, 0, 1, np.zeros(vocab_size, dtype=np.int64), collections.Counter())
        if self._journal.exists():
            found = json.loads(self._journal.read_text())
            counts = np.array(found["token_counts"], dtype=np.int64)
            found |= {"token_counts": counts, "counts": collections.Counter(found["counts"])}
            self.progress = Progress(**found)
        self._files = [path.open("ab") for path in (self.values_path, self._lengths_path)]
        for file, count in zip(self._files, self._sizes(), strict=True):
            file.truncate(count * np.dtype(np.int32).itemsize)
        self._saved = time.monotonic()

    def _sizes(self) -> tuple[int, int]:
        return self.progress.values, self.progress.examples * self.progress.rows

    def add(self, block: Block) -> None:
        """Appends what a task has made."""
        progress = self.progress
        for file, numbers in zip(self._files, (block.values, block.lengths), strict=True):
            file.write(numbers.tobytes())
        progress.tasks += 1
        progress.values += len(block.values)
        if len(block.lengths):
            progress.examples += len(block.lengths)
            progress.rows = block.lengths.shape[1]
        progress.token_counts += block.token_counts
        progress.counts += block.counts
        if time.monotonic() - self._saved > _INTERVAL_S:
            self.save()

    def save(self) -> None:
        """Makes what was added last."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        content = {**vars(self.progress), "token_counts": self.progress.token_counts.tolist()}
        partial = self._journal.with_suffix(".partial")
        partial.write_text(json.dumps(content))
        partial.rename(self._journal)
        self._saved = time.monotonic()

    def lengths(self) -> npt.NDArray[np.int32]:
        """Lengths of the rows of all examples, [examples, rows of an example]."""
        return np.fromfile(self._lengths_path, dtype=np.int32).reshape(-1, self.progress.rows)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            file.close()

    def remove(self) -> None:
        """Deletes everything."""
        self.close()
        for path in (self.values_path, self._lengths_path, self._journal):
            path.unlink(missing_ok=True)
