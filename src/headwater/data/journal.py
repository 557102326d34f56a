"""Journal of the first pass of a preparation, from which a killed preparation continues."""

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
from headwater.data.staging import complete_file

_INTERVAL_S = 1.0


@dataclasses.dataclass
class Progress:
    """Counts of the finished tasks of the first pass.

    Attributes:
        tasks: number of finished tasks.
        values: number of int32 values in the file of values.
        examples: number of examples in the file of lengths.
        rows: rows of an example.
        token_counts: how often each token occurs, [vocab_size].
        counts: number of documents, of records left out by reason, and so on.
    """

    tasks: int
    values: int
    examples: int
    rows: int
    token_counts: npt.NDArray[np.int64]
    counts: collections.Counter[str]


class Corpus:
    """Two files, to which each task appends the values and the lengths of its examples.

    Opening existing files truncates them to the state of the last journal.

    Args:
        folder: folder of the files.
        vocab_size: largest token id plus one.
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
            # A killed process may have written examples after its last save. They are cut off here, and their
            # tasks run again.
            file.truncate(count * np.dtype(np.int32).itemsize)
        self._saved = time.monotonic()

    def _sizes(self) -> tuple[int, int]:
        return self.progress.values, self.progress.examples * self.progress.rows

    def add(self, block: Block) -> None:
        """Append the examples of a task. Tasks must arrive in order."""
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
        """Make everything that was added durable, so that a killed preparation continues from here."""
        # The files reach the disk before the journal: a journal never counts values that are not there.
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        content = {**vars(self.progress), "token_counts": self.progress.token_counts.tolist()}
        with complete_file(self._journal) as partial:
            partial.write_text(json.dumps(content))
        self._saved = time.monotonic()

    def lengths(self) -> npt.NDArray[np.int32]:
        """Return the lengths of the rows of all saved examples, [examples, rows of an example]."""
        return np.fromfile(self._lengths_path, dtype=np.int32).reshape(-1, self.progress.rows)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def remove(self) -> None:
        """Close and delete the files and the journal."""
        self.close()
        for path in (self.values_path, self._lengths_path, self._journal):
            path.unlink(missing_ok=True)
