"""Input files of a preparation, read as numbered tasks and shown on a progress bar."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from rich.progress import Progress

from headwater.data.documents import Piece, read_pieces
from headwater.data.duplicates import Duplicates
from headwater.data.packing import numbered_tasks
from headwater.data.raw_records import BadRecords, Record, read_records


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The input files, as pieces of running text or as records.

    Attributes:
        files: the files.
        reads: "documents" to read running text, "records" to read fields.
        json_key: key of the text in records, for running text.
        bar: progress bar; each pass over the files is a task of it.
        kept: True for each document or record that is read, in order; by default all are read.
        makes_example: returns False for a record from which no example can be made; by default no record is
            checked.
    """

    files: Sequence[Path]
    reads: Literal["documents", "records"]
    json_key: str
    bar: Progress
    kept: npt.NDArray[np.bool_] | None = None
    makes_example: Callable[[Record], bool] | None = None

    @property
    def names(self) -> str:
        """The first files, for error messages."""
        return ", ".join(map(str, self.files[:3]))

    @property
    def left_out(self) -> int:
        """Number of documents or records that are not read."""
        return 0 if self.kept is None else int(np.count_nonzero(~self.kept))

    def documents(self, bad: BadRecords) -> Iterator[Piece]:
        """Yield all documents in pieces. The strings of a record are one document.

        The document of a record from which no example can be made is empty. Empty documents are similar to no
        other, so such a record does not replace one that can be used.
        """
        if self.reads == "documents":
            yield from self._pieces("comparing", bad, Duplicates())
        else:
            for record in self._records("comparing", bad, Duplicates()):
                is_usable = self.makes_example is None or self.makes_example(record)
                text = "\n".join(_strings(record.fields)) if is_usable else ""
                yield Piece(text, True, len(text), record.file_bytes)

    def texts(self, bad: BadRecords, duplicates: Duplicates) -> Iterator[str]:
        """Yield all texts, for the training of a tokenizer."""
        if self.reads == "documents":
            yield from (piece.text for piece in self._pieces("training tokenizer", bad, duplicates))
        else:
            for record in self._records("training tokenizer", bad, duplicates):
                yield from _strings(record.fields)

    def tasks(
        self, bad: BadRecords, duplicates: Duplicates
    ) -> Iterator[tuple[int, Sequence[Piece | Record]]]:
        """Yield numbered tasks of pieces or records; every call yields the same tasks."""
        if self.reads == "documents":
            return numbered_tasks(self._pieces("tokenizing", bad, duplicates), lambda piece: len(piece.text))
        return numbered_tasks(self._records("tokenizing", bad, duplicates), _record_chars)

    def _pieces(self, description: str, bad: BadRecords, duplicates: Duplicates) -> Iterator[Piece]:
        pieces = read_pieces(self.files, json_key=self.json_key, bad=bad, duplicates=duplicates)
        return self._kept(description, pieces)

    def _records(self, description: str, bad: BadRecords, duplicates: Duplicates) -> Iterator[Record]:
        return self._kept(description, duplicates.new_records(read_records(self.files, bad)))

    def _kept(self, description: str, items: Iterator[Any]) -> Iterator[Any]:
        """Yield the pieces or records that are kept, and show how much of the files was read."""
        task = self.bar.add_task(description, total=sum(path.stat().st_size for path in self.files))
        number = -1
        for item in items:
            number += getattr(item, "begins_document", True)
            if self.kept is None or self.kept[number]:
                yield item
            self.bar.update(task, completed=item.file_bytes)


def _record_chars(record: Record) -> int:
    # Without the + 1, records without text would never fill a task, and would pile up in memory.
    return sum(len(text) for text in _strings(record.fields)) + 1


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a record."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)
