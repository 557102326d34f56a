"""Records of jsonl, json, csv and parquet files, read one at a time."""

from __future__ import annotations

import codecs
import contextlib
import csv
import dataclasses
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from headwater.core.errors import DataError
from headwater.core.names import similar
from headwater.core.units import counted

RECORD_KINDS = (".jsonl", ".json", ".csv", ".parquet")
"""Suffixes of files that hold records; all but parquet may be compressed (`.gz`)."""

MAX_RECORD_BYTES = 64 << 20
"""Maximum size of a record, because parsing it takes several times its size in memory."""

_BLOCK_CHARS = 1 << 16
_PARQUET_ROWS = 256
_JSONL_REMEDY = "each line must be one JSON object; --skip_bad_records leaves out and counts other lines"
_CSV_REMEDY = "the first line must name the columns, and each other line must have as many fields"
_LONG_REMEDY = "split it into several records; --skip_bad_records leaves it out"
_BETWEEN = re.compile(r"[ \t\r\n,]*")
_JSON_REMEDY = (
    "the file must hold one list of JSON objects; a file with one object per line must end in .jsonl"
)
UTF8_REMEDY = "convert it to UTF-8, for example with iconv"


@dataclasses.dataclass(frozen=True)
class Record:
    """One record of an input file, and its place for error messages.

    Attributes:
        fields: values by name.
        where: file and line (or number of the record), for error messages.
        file_bytes: bytes of the input files read so far (compressed size), for the progress bar.
    """

    fields: dict[str, Any]
    where: str
    file_bytes: int


@dataclasses.dataclass
class BadRecords:
    """Decides if records that cannot be used are skipped, and counts them.

    Attributes:
        skip: leave them out and count them; otherwise the first is an error.
        count: number of records left out.
    """

    skip: bool = False
    count: int = 0

    def add(self, error: DataError) -> None:
        """Count a record that cannot be used, or raise `error` if such records are not skipped.

        Args:
            error: the reason.

        Raises:
            DataError: `error`, unless `skip` is set.
        """
        if not self.skip:
            raise error
        self.count += 1


def read_records(files: Sequence[Path], bad: BadRecords) -> Iterator[Record]:
    """Yield every record of `files` in order. Only one line, or one block of a file, is in memory.

    Raises:
        DataError: if a file is damaged, or a record is damaged and `bad` does not skip it.
    """
    done = 0
    for path in files:
        kind = file_kind(path)
        if kind not in RECORD_KINDS:
            raise DataError(
                f"this mode reads records, but a {kind} file holds running text",
                where=str(path),
                remedy=f"name files that end in {', '.join(RECORD_KINDS)}",
            )
        with opened(path) as (stream, raw):
            records = _parquet_records(path, raw) if kind == ".parquet" else _READERS[kind](path, stream, bad)
            for fields, where in records:
                yield Record(fields, where, done + raw.tell())
        done += path.stat().st_size


def file_kind(path: Path) -> str:
    """Return the suffix of the file's name; the suffix of a compression (`.gz`) does not count."""
    return Path(path.name.removesuffix(".gz")).suffix


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], io.BufferedReader]]:
    """Open a file; yield the uncompressed stream, and the raw file, whose position shows the progress.

    Raises:
        DataError: if the file cannot be read, or its compression is damaged.
    """
    try:
        with path.open("rb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(fileobj=raw) as stream:
                    yield io.BufferedReader(stream), raw
            else:
                yield raw, raw
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        what = f"gzip file is damaged or cut short: {error}"
        raise DataError(what, where=str(path), remedy="download or compress it again") from error
    except OSError as error:
        raise DataError(
            f"input cannot be read: {error.strerror}",
            where=str(path),
            remedy="make the file readable, or remove it from the inputs",
        ) from error


_MODES = {
    "chosen": "preference",
    "messages": "chat",
    "conversations": "chat",
    "completion": "prompt_completion",
    "output": "prompt_completion",
}
"""Field of a record -> the mode of `headwater data` that reads such records, instead of running text.

A preference may have the fields of a conversation too, so its field is the first.
"""


def text_of(record: Record, key: str) -> str:
    """Return the text at `key` of a record.

    Raises:
        DataError: if the record has no such key, or its value is not text.
    """
    if key not in record.fields:
        near = similar(key, record.fields, count=1) or sorted(record.fields)[:5]
        remedy = f"name the key of the text with --json_key; the record has {', '.join(map(repr, near))}"
        mode = next((mode for field, mode in _MODES.items() if field in record.fields), None)
        if mode is not None:
            remedy = f"write --mode {mode}, which reads records like this one; or {remedy}"
        raise DataError(f"record has no key {key!r}", where=record.where, remedy=remedy)
    return checked_text(record.fields[key], key, record.where)


def checked_text(value: object, key: str, where: str) -> str:
    """Return `value` if it is valid text.

    Args:
        value: value to check.
        key: key of the value in the record, for the error message.
        where: place of the record, for the error message.

    Raises:
        DataError: if it is not a string, or cannot be encoded as UTF-8.
    """
    if not isinstance(value, str):
        what = f"expected a string at {key!r}, got {type(value).__name__}"
        raise DataError(what, where=where, remedy="name the key of the text with --json_key or --keys")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        what = f"the string at {key!r} holds half of a surrogate pair, so it is not valid Unicode"
        raise DataError(what, where=where, remedy="repair the \\u escapes of this line") from error
    return value


_Found = Iterator[tuple[dict[str, Any], str]]


def _jsonl_records(path: Path, stream: IO[bytes], bad: BadRecords) -> _Found:
    for number, line in _lines(path, stream, bad):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                fields = _parsed(line, where)
            except DataError as error:
                bad.add(error)
            else:
                yield fields, where


def _lines(path: Path, stream: IO[bytes], bad: BadRecords) -> Iterator[tuple[int, bytes]]:
    """Yield the number and bytes of each line; a line that is too long is added to `bad` and skipped."""
    number = 0
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        number += 1
        if len(line) <= MAX_RECORD_BYTES:
            yield number, line
            continue
        bad.add(_too_long("line", f"{path}, line {number}"))
        while line and not line.endswith(b"\n"):
            line = stream.readline(_BLOCK_CHARS)


def _too_long(what: str, where: str) -> DataError:
    return DataError(f"{what} is longer than {MAX_RECORD_BYTES >> 20} MiB", where=where, remedy=_LONG_REMEDY)


def _csv_records(path: Path, stream: IO[bytes], bad: BadRecords) -> _Found:
    """Yield a record for each row: strings by the column names of the first row."""
    number = 0

    def lines() -> Iterator[str]:
        nonlocal number
        for number, line in _lines(path, stream, bad):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                where = f"{path}, line {number}"
                raise DataError("line is not UTF-8", where=where, remedy=UTF8_REMEDY) from error

    # The default limit of 128 KiB is shorter than many documents.
    csv.field_size_limit(MAX_RECORD_BYTES)
    rows = csv.reader(lines(), strict=True)
    try:
        names = next(rows, [])
        if len(set(names)) < len(names) or not all(names):
            what = f"expected a different name for each column, got {names}"
            raise DataError(what, where=f"{path}, line 1", remedy=_CSV_REMEDY)
        for row in rows:
            where = f"{path}, line {number}"
            if len(row) == len(names):
                yield dict(zip(names, row, strict=True)), where
            elif row:
                what = f"expected {counted(len(names), 'field', 'fields')}, got {len(row)}"
                bad.add(DataError(what, where=where, remedy=_CSV_REMEDY))
    except csv.Error as error:
        raise DataError(
            f"file is not CSV: {error}", where=f"{path}, line {number}", remedy=_CSV_REMEDY
        ) from error


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.rstrip().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError("line is not UTF-8", where=where, remedy=UTF8_REMEDY) from error
    except json.JSONDecodeError as error:
        what = f"line is not JSON: {error.msg} at character {error.pos + 1}"
        raise DataError(what, where=where, remedy=_JSONL_REMEDY) from error
    # The parser also fails for integers of more than 4300 digits, and for deep nesting.
    except (ValueError, RecursionError) as error:
        raise DataError(f"line is not JSON: {error}", where=where, remedy=_JSONL_REMEDY) from error
    return _as_fields(value, "line", where, _JSONL_REMEDY)


def _as_fields(value: Any, what: str, where: str, remedy: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise DataError(f"expected a JSON object in this {what}, got {kind}", where=where, remedy=remedy)
    return value


def _json_records(path: Path, stream: IO[bytes], bad: BadRecords) -> _Found:
    for number, value in enumerate(_json_values(path, stream), start=1):
        where = f"{path}, record {number}"
        try:
            fields = _as_fields(value, "record", where, _JSON_REMEDY)
        except DataError as error:
            bad.add(error)
        else:
            yield fields, where


def _json_values(path: Path, stream: IO[bytes]) -> Iterator[Any]:
    """Yield the elements of a JSON list. Only one element and one block of the file are in memory."""
    decode = json.JSONDecoder().raw_decode
    reader = codecs.getreader("utf-8-sig")(stream)
    try:
        held = reader.read(_BLOCK_CHARS).lstrip()
        if not held.startswith("["):
            raise DataError("file is not a JSON list", where=str(path), remedy=_JSON_REMEDY)
        place, number = 1, 0
        while True:
            place = _end_of(_BETWEEN, held, place)
            if held.startswith("]", place):
                return
            try:
                value, place = decode(held, place)
            except (ValueError, RecursionError) as error:
                if len(held) - place > MAX_RECORD_BYTES:
                    raise _too_long("record", f"{path}, record {number + 1}") from error
                # The element is incomplete, so more is read. The amount doubles each time. So the total cost
                # of decoding a long element from its start is proportional to its length.
                more = reader.read(max(_BLOCK_CHARS, len(held) - place))
                if not more:
                    where = f"{path}, record {number + 1}"
                    raise DataError(f"file is not JSON: {error}", where=where, remedy=_JSON_REMEDY) from error
                held, place = held[place:] + more, 0
            else:
                number += 1
                yield value
    except UnicodeDecodeError as error:
        raise DataError("file is not UTF-8", where=str(path), remedy=UTF8_REMEDY) from error


def _end_of(pattern: re.Pattern[str], text: str, place: int) -> int:
    match = pattern.match(text, place)
    assert match is not None, "the pattern also matches the empty string"
    return match.end()


_READERS: dict[str, Callable[[Path, IO[bytes], BadRecords], _Found]] = {
    ".jsonl": _jsonl_records,
    ".json": _json_records,
    ".csv": _csv_records,
}


def _parquet_records(path: Path, raw: io.BufferedReader) -> _Found:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        remedy = "pip install 'headwater[parquet]'"
        raise DataError("reading parquet needs pyarrow", where=str(path), remedy=remedy) from error
    number = 0
    try:
        for batch in parquet.ParquetFile(raw).iter_batches(batch_size=_PARQUET_ROWS):
            for fields in batch.to_pylist():
                number += 1
                yield fields, f"{path}, row {number}"
    except ArrowException as error:
        what = f"parquet file is damaged: {error}"
        raise DataError(what, where=str(path), remedy="download or write the file again") from error
