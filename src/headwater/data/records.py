"""Reader of samples with named fields, in HDF5 or CSV files: batches of the fields that a model reads."""

from __future__ import annotations

import ast
import csv
import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
import numpy.typing as npt
import torch

from headwater.core.errors import DataError
from headwater.core.units import counted
from headwater.data.checksums import DAMAGE, CheckedSamples, cannot_open
from headwater.data.file_index import FileIndex
from headwater.data.loader import Batch
from headwater.data.open_files import OpenFiles

Values = npt.NDArray[np.int64]

_REMEDY = "prepare the files again, or name the folder that holds them"


@dataclasses.dataclass(frozen=True)
class FieldSpec:
    """A field of a sample: its name in a batch and in files, its shape, and its allowed values.

    Attributes:
        name: name in the batch.
        stored: names that the field may have in the files; the first that a file has is read.
        length: shape of the field in a sample; `()` is a single number. Shorter values are padded, longer
            values are cut.
        fill: value of the padding.
        default: value of all elements if a file lacks the field; `None`: a file without it is an error.
        below: all values must be below this number, if it is given.
        remedy: advice in the error for a value that is not below it.
    """

    name: str
    stored: tuple[str, ...]
    length: tuple[int, ...] = ()
    fill: int = 0
    default: int | None = None
    below: int | None = None
    remedy: str = "use data that were prepared for this model"


class RecordFile(Protocol):
    """A file of samples."""

    @property
    def path(self) -> Path: ...

    @property
    def names(self) -> frozenset[str]:
        """Fields of each sample."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int, name: str) -> Any:
        """Return a field of a sample: a number, or nested lists or an array of numbers."""
        ...


class CSVRecords:
    """A CSV file with one sample per line, whose columns hold numbers or lists.

    Args:
        path: path of the file. Lists are written as in Python or JSON.

    Raises:
        DataError: if the file cannot be read, is compressed or empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix == ".gz":
            raise DataError(
                "a compressed CSV file cannot be read in random order",
                where=str(path),
                remedy="decompress it (gunzip)",
            )
        try:
            # Only the positions of the lines stay in memory; a line is read when its sample is needed.
            with path.open("rb") as file:
                lengths = [len(line) for line in file]
        except OSError as error:
            raise DataError(f"cannot read the file: {error}", where=str(path), remedy=_REMEDY) from error
        if not lengths:
            raise DataError("the file is empty", where=str(path), remedy=_REMEDY)
        self._starts = list(itertools.accumulate(lengths, initial=0))
        self._columns = self._line(0)
        self._last: tuple[int, list[str]] | None = None

    @property
    def names(self) -> frozenset[str]:
        """Names of the columns."""
        return frozenset(self._columns)

    def __len__(self) -> int:
        # `_starts` also has the end of the file, and the first line is the header.
        return len(self._starts) - 2

    def read(self, index: int, name: str) -> Any:
        """Return a field of a sample.

        Raises:
            DataError: if the line is malformed.
        """
        # The fields of a sample are read one after the other; its line is parsed only once.
        if self._last is None or self._last[0] != index:
            self._last = index, self._line(index + 1)
        fields, where = self._last[1], f"{self.path}, line {index + 2}"
        if len(fields) != len(self._columns):
            columns = counted(len(self._columns), "column", "columns")
            raise DataError(
                f"expected {columns} as in the header, got {len(fields)}",
                where=where,
                remedy="correct or remove the line",
            )
        text = fields[self._columns.index(name)]
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError) as error:
            raise DataError(
                f"expected a number or a list in column {name}, got {text[:40]!r}",
                where=where,
                remedy="correct or remove the line",
            ) from error

    def _line(self, number: int) -> list[str]:
        start, stop = self._starts[number : number + 2]
        with self.path.open("rb") as file:
            file.seek(start)
            line = file.read(stop - start)
        try:
            # The first line may begin with a byte order mark, which spreadsheets write.
            text = line.decode("utf-8" if number else "utf-8-sig")
            # A line is a whole record: columns hold Python literals, in which line breaks are escaped.
            return next(csv.reader([text]))
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(
                f"the line cannot be read: {error}",
                where=f"{self.path}, line {number + 1}",
                remedy="correct or remove the line",
            ) from error


class HDF5Records:
    """An HDF5 file with one dataset [samples, …] per field.

    Args:
        path: path of the file.
        open_files: cache that opens the file when it is read; shared by the files of a data set.

    Raises:
        DataError: if it cannot be read, or the datasets differ in the number of samples.
    """

    def __init__(self, path: Path, open_files: OpenFiles) -> None:
        self.path = path
        self._open_files = open_files
        try:
            with h5py.File(path, "r") as file:
                sizes = {name: len(data) for name, data in file.items() if isinstance(data, h5py.Dataset)}
                for name in sizes:
                    CheckedSamples(file, path).check(name)
        except DAMAGE as error:
            raise cannot_open(path, error, _REMEDY) from error
        if len(set(sizes.values())) != 1:
            raise DataError(
                f"expected datasets of the same length, got {sizes or 'none'}",
                where=str(path),
                remedy=_REMEDY,
            )
        self._size = next(iter(sizes.values()))
        self.names = frozenset(sizes)

    def __len__(self) -> int:
        return self._size

    def read(self, index: int, name: str) -> Any:
        """Return a field of a sample.

        Raises:
            DataError: if it cannot be read, or does not match its checksum.
        """
        return self._open_files[self.path].read(name, index)


class Records:
    """The samples of several files as one data set.

    Args:
        files: files of samples, in order.
        fields: fields of a batch.
        sequence_length: tokens per sample.

    Raises:
        DataError: if the files have no samples, or lack a field.
    """

    def __init__(
        self, files: Sequence[RecordFile], fields: Sequence[FieldSpec], sequence_length: int
    ) -> None:
        self.files, self.fields = list(files), list(fields)
        self.sequence_length = sequence_length
        self._index = FileIndex(map(len, files))
        if not len(self._index):
            raise DataError("the files hold no samples", where=str(files[0].path), remedy=_REMEDY)
        for file in files:
            for field in fields:
                _stored_name(field, file)

    def __len__(self) -> int:
        return len(self._index)

    def __getitems__(self, draws: Sequence[int]) -> Batch | DataError:
        """Return the batch of these draws (numbers of samples; see `headwater.data.source.Samples`)."""
        try:
            samples = [self.sample(draw % len(self)) for draw in draws]
        except DataError as error:
            return error
        return {
            field.name: torch.from_numpy(np.stack([sample[field.name] for sample in samples]))
            for field in self.fields
        }

    def sample(self, index: int) -> dict[str, Values]:
        """Return all fields of a sample, each padded or cut to the length in its specification.

        Raises:
            DataError: if a field cannot be read or has an unexpected shape or value.
        """
        number, place = self._index.find(index)
        file = self.files[number]
        return {field.name: self._field(field, file, place) for field in self.fields}

    def _field(self, field: FieldSpec, file: RecordFile, place: int) -> Values:
        name = _stored_name(field, file)
        if name is None:
            return np.full(field.length, field.default, dtype=np.int64)
        where = f"{file.path}, sample {place}, {name}"
        try:
            values = _whole_numbers(np.asarray(file.read(place, name)))
            if not field.length:
                values = values.reshape(-1)[:1].reshape(())
        except (ValueError, TypeError, OverflowError, OSError) as error:
            raise DataError(f"the field cannot be read: {error}", where=where, remedy=_REMEDY) from error
        if values.ndim != len(field.length):
            raise DataError(
                f"expected a field with {len(field.length)} dimensions, got {values.ndim}",
                where=where,
                remedy=_REMEDY,
            )
        if field.below is not None and values.size and int(values.max()) >= field.below:
            raise DataError(
                f"expected values below {field.below}, got {int(values.max())}",
                where=where,
                remedy=field.remedy,
            )
        return _fitted(values, field)


def _whole_numbers(values: npt.NDArray[Any]) -> Values:
    """Return `values` as integers. Raise `ValueError` for a fraction: nothing is rounded."""
    if values.dtype.kind == "f" and (fractions := values[values % 1 != 0]).size:
        raise ValueError(f"expected whole numbers, got {fractions[0]}")
    return values.astype(np.int64)


def _fitted(values: Values, field: FieldSpec) -> Values:
    """Return `values` cut or padded to the length of the field."""
    fitted = np.full(field.length, field.fill, dtype=np.int64)
    inside = tuple(slice(min(have, want)) for have, want in zip(values.shape, field.length, strict=True))
    fitted[inside] = values[inside]
    return fitted


def _stored_name(field: FieldSpec, file: RecordFile) -> str | None:
    """Return the name of a field in a file, or `None` if the file lacks it and the field has a default.

    Raises:
        DataError: if the file lacks the field and the field has no default.
    """
    name = next((name for name in field.stored if name in file.names), None)
    if name is None and field.default is None:
        raise DataError(
            f"the file has no field {field.stored[0]}; its fields: {', '.join(sorted(file.names)) or 'none'}",
            where=str(file.path),
            remedy="use data that were prepared for this data_processor, or the data_processor of these data",
        )
    return name


def open_records(folder: Path, fields: Sequence[FieldSpec], sequence_length: int) -> Records:
    """Return the samples in the HDF5 and CSV files of a folder as one data set.

    Args:
        folder: folder of the files, which are read in order of their names.
        fields: fields of a batch.
        sequence_length: tokens per sample.

    Raises:
        DataError: if no file is found, or a file is damaged or lacks a field.
    """
    open_files = OpenFiles()
    files: list[RecordFile] = [
        CSVRecords(path) if path.suffix == ".csv" else HDF5Records(path, open_files)
        for path in record_files(folder, (".h5", ".hdf5", ".csv"))
    ]
    return Records(files, fields, sequence_length)


def record_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files of a folder that have one of `suffixes`, in order of their names.

    Raises:
        DataError: if there are no such files.
    """
    found = sorted(path for path in folder.glob("*") if path.suffix in suffixes)
    if not found:
        listed = " or ".join(suffixes)
        raise DataError(
            f"data_dir holds no {listed} file" if folder.is_dir() else "data_dir is not a folder",
            where=f"data_dir: {folder}",
            remedy="name the folder that holds the prepared files, for example DIR/train",
        )
    return found
