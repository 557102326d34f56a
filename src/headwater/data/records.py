"""Samples of named fields, in HDF5 or CSV files, as batches of the fields that a model reads."""

from __future__ import annotations

import ast
import bisect
import csv
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import h5py
import numpy as np
import numpy.typing as npt
import torch

from headwater.core.errors import DataError
from headwater.core.units import counted
from headwater.data.checksums import DAMAGE, CheckedSamples
from headwater.data.loader import Batch

Values = npt.NDArray[np.int64]

_REMEDY = "make the files anew, or name the folder that holds them"


@dataclasses.dataclass(frozen=True)
class FieldSpec:
    """One tensor of a batch.

    Attributes:
        name: in the batch.
        stored: names that it may have in the files, the first that is there counts.
        length: elements of a sample along each dimension; `()` is a single number. Shorter ones are filled
            up, longer ones cut.
        fill: what shorter ones are filled up with.
        default: the value of all elements where the files have no such field; without one they must.
        below: number above every value, if there is one.
        remedy: what to do where a value is not below it.
    """

    name: str
    stored: tuple[str, ...]
    length: tuple[int, ...] = ()
    fill: int = 0
    default: int | None = None
    below: int | None = None
    remedy: str = "name data that were made for this model"


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
        """A field of a sample: a number, or numbers in nested lists."""
        ...


class CSVRecords:
    """A CSV file whose columns hold numbers or lists, a sample a line.

    Args:
        path: the file; a list is written as Python or JSON write it.

    Raises:
        DataError: if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.suffix == ".gz":
            raise DataError(
                "a compressed CSV file cannot be read from the middle", where=str(path), remedy="unpack it"
            )
        try:
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
        """Columns."""
        return frozenset(self._columns)

    def __len__(self) -> int:
        return len(self._starts) - 2

    def read(self, index: int, name: str) -> Any:
        """A field of a sample."""
        if self._last is None or self._last[0] != index:
            self._last = index, self._line(index + 1)
        fields, where = self._last[1], f"{self.path}, line {index + 2}"
        if len(fields) != len(self._columns):
            raise DataError(
                f"the line has {counted(len(fields), 'column', 'columns')}, the header {len(self._columns)}",
                where=where,
                remedy="correct or remove the line",
            )
        text = fields[self._columns.index(name)]
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError) as error:
            raise DataError(
                f"{name} is neither a number nor a list: {text[:40]!r}",
                where=where,
                remedy="correct or remove the line",
            ) from error

    def _line(self, number: int) -> list[str]:
        start, stop = self._starts[number : number + 2]
        with self.path.open("rb") as file:
            file.seek(start)
            text = file.read(stop - start).decode("utf-8", errors="replace")
        return next(csv.reader([text]))


class HDF5Records:
    """An HDF5 file with a dataset for each field, the sample first: [samples, …].

    Args:
        path: the file.

    Raises:
        DataError: if it cannot be read, or the datasets differ in the number of samples.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._samples: CheckedSamples | None = None
        try:
            with h5py.File(path, "r") as file:
                sizes = {name: len(data) for name, data in file.items() if isinstance(data, h5py.Dataset)}
                for name in sizes:
                    CheckedSamples(file, path).check(name)
        except DAMAGE as error:
            raise DataError(f"HDF5 file does not open: {error}", where=str(path), remedy=_REMEDY) from error
        if len(set(sizes.values())) != 1:
            raise DataError(
                f"datasets of one length are expected, found {sizes or 'none'}",
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
            DataError: if it cannot be read, or is not what was written.
        """
        if self._samples is None:
            self._samples = CheckedSamples(h5py.File(self.path, "r"), self.path)
        return self._samples.read(name, index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_samples": None}  # an open file does not survive another process


class Records:
    """The samples of several files as one numbered sequence.

    Args:
        files: the files; each sample has the same fields.
        fields: what a batch is made of.
        sequence_length: tokens of a sample.

    Raises:
        DataError: if there is no sample, or a field is missing.
    """

    def __init__(
        self, files: Sequence[RecordFile], fields: Sequence[FieldSpec], sequence_length: int
    ) -> None:
        self.files, self.fields = list(files), list(fields)
        self.sequence_length = sequence_length
        self._ends = list(itertools.accumulate(map(len, files)))
        if not self._ends or not self._ends[-1]:
            raise DataError("the files hold no samples", where=str(files[0].path), remedy=_REMEDY)
        for file in files:
            for field in fields:
                _stored_name(field, file)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitems__(self, draws: Sequence[int]) -> Batch | DataError:
        """The batch of these samples; see `headwater.data.source.Samples`."""
        try:
            samples = [self.sample(draw % len(self)) for draw in draws]
        except DataError as error:
            return error
        return {
            field.name: torch.from_numpy(np.stack([sample[field.name] for sample in samples]))
            for field in self.fields
        }

    def sample(self, index: int) -> dict[str, Values]:
        """All fields of a sample, each with the length that its specification says."""
        number = bisect.bisect_right(self._ends, index)
        file = self.files[number]
        place = index - (self._ends[number] - len(file))
        return {field.name: self._field(field, file, place) for field in self.fields}

    def _field(self, field: FieldSpec, file: RecordFile, place: int) -> Values:
        name = _stored_name(field, file)
        if name is None:
            return np.full(field.length, field.default, dtype=np.int64)
        where = f"{file.path}, sample {place}, {name}"
        try:
            values = np.asarray(file.read(place, name), dtype=np.int64)
        except (ValueError, TypeError, OSError) as error:
            raise DataError(f"the field cannot be read: {error}", where=where, remedy=_REMEDY) from error
        if not field.length:
            values = values.reshape(-1)[:1].reshape(())
        if values.ndim != len(field.length):
            raise DataError(
                f"the field has {values.ndim} dimensions, {len(field.length)} are expected",
                where=where,
                remedy=_REMEDY,
            )
        if field.below is not None and values.size and int(values.max()) >= field.below:
            raise DataError(
                f"the value {int(values.max())} is not below {field.below}",
                where=where,
                remedy=field.remedy,
            )
        return _fitted(values, field)


def _fitted(values: Values, field: FieldSpec) -> Values:
    """`values` cut or filled up to the length of the field."""
    fitted = np.full(field.length, field.fill, dtype=np.int64)
    inside = tuple(slice(min(have, want)) for have, want in zip(values.shape, field.length, strict=True))
    fitted[inside] = values[inside]
    return fitted


def _stored_name(field: FieldSpec, file: RecordFile) -> str | None:
    """What a file calls a field; `None` where it has none and need not."""
    name = next((name for name in field.stored if name in file.names), None)
    if name is None and field.default is None:
        raise DataError(
            f"the file has no field {field.stored[0]}, it has {', '.join(sorted(file.names)) or 'none'}",
            where=str(file.path),
            remedy="name data that were made for this data_processor, or the data_processor that reads these",
        )
    return name


def open_records(folder: Path, fields: Sequence[FieldSpec], sequence_length: int) -> Records:
    """The samples in the HDF5 or CSV files of a folder.

    Args:
        folder: where the files are, all of one kind; read in order of their names.
        fields: what a batch is made of.
        sequence_length: tokens of a sample.

    Raises:
        DataError: if there are no files, or one is damaged or lacks a field.
    """
    kinds: Mapping[str, type[CSVRecords] | type[HDF5Records]] = {
        ".h5": HDF5Records,
        ".hdf5": HDF5Records,
        ".csv": CSVRecords,
    }
    files: list[RecordFile] = [kinds[path.suffix](path) for path in record_files(folder, tuple(kinds))]
    return Records(files, fields, sequence_length)


def record_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files of a folder whose names end in one of `suffixes`, in order of their names.

    Raises:
        DataError: if there are none.
    """
    found = sorted(path for path in folder.glob("*") if path.suffix in suffixes)
    if not found:
        listed = " or ".join(suffixes)
        raise DataError(
            f"data_dir holds no {listed} file" if folder.is_dir() else "data_dir is not a folder",
            where=f"data_dir: {folder}",
            remedy="name the folder that holds them",
        )
    return found
