"""Documents out of txt and jsonl files, plain or gzipped, streamed piece by piece."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import difflib
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from headwater.core.errors import DataError

SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")

PIECE_CHARS = 1 << 16
"""Characters of a document that are tokenized at once: tokenizers slow down on much longer strings."""

# Byte-level pre-tokenizers always separate "word" from " word", so a cut there changes no token.
_CUT = re.compile(r"(?<=\w)(?= \w)")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of one document.

    Attributes:
        text: its characters; never empty.
        ends_document: whether the document ends here.
        text_bytes: length of `text` in UTF-8.
        file_bytes: bytes of the input files read so far, compressed where they are: for progress.
    """

    text: str
    ends_document: bool
    text_bytes: int
    file_bytes: int


def find_inputs(inputs: Sequence[Path]) -> list[Path]:
    """Files to read, in the order given; a folder stands for all text files below it, sorted by path.

    Raises:
        DataError: for a path that is missing, of an unknown kind, or a folder without text files.
    """
    found: list[Path] = []
    for path in inputs:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and _is_text(file))
            if not inside:
                raise DataError("no text files in this folder", where=str(path), remedy=_SUFFIX_REMEDY)
            found += inside
        elif not path.exists():
            raise DataError("input does not exist", where=str(path), remedy=_nearest_sibling(path))
        elif not _is_text(path):
            raise DataError("input is not of a known kind", where=str(path), remedy=_SUFFIX_REMEDY)
        else:
            found.append(path)
    if not found:
        raise DataError("no input files given", remedy="name at least one file or folder of text")
    return found


def read_pieces(files: Sequence[Path], *, json_key: str = "text") -> Iterator[Piece]:
    """Every document of `files` in order, in pieces; empty documents are left out.

    A txt file is one document, a line of a jsonl file is one. Memory holds one piece or one line.

    Raises:
        DataError: names file and line (jsonl) or byte (txt) of what cannot be read.
    """
    done = 0
    for path in files:
        documents_of = _jsonl_documents if _kind(path) == ".jsonl" else _txt_documents
        with _opened(path) as (stream, raw):
            for document in documents_of(path, stream, json_key):
                for text, ends in cut_pieces(document):
                    yield Piece(text, ends, len(text.encode()), done + raw.tell())
        done += path.stat().st_size


def _txt_documents(path: Path, stream: IO[bytes], _json_key: str) -> Iterator[Iterable[str]]:
    yield _decoded(path, stream)


def _jsonl_documents(path: Path, stream: IO[bytes], json_key: str) -> Iterator[Iterable[str]]:
    for number, line in enumerate(stream, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            text = _text_of(_parse_line(line, where), json_key, where)
            yield (text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS))


def cut_pieces(blocks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Cuts one document, given in blocks, into pieces (text, ends_document); an empty one into none."""
    held = ""
    for block in blocks:
        held += block
        while len(held) > PIECE_CHARS:
            at = _cut_point(held)
            yield held[:at], False
            held = held[at:]
    if held:
        yield held, True


def _cut_point(text: str) -> int:
    """The last gap between two words in the first `PIECE_CHARS` characters; without one, their end."""
    for start in (PIECE_CHARS - 4096, 1):
        cuts = [match.start() for match in _CUT.finditer(text, start, PIECE_CHARS)]
        if cuts:
            return cuts[-1]
    return PIECE_CHARS


def _decoded(path: Path, stream: IO[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    while True:
        block = stream.read(PIECE_CHARS)
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            where = f"{path}, byte {position - pending + error.start}"
            raise DataError("text is not UTF-8", where=where, remedy=_UTF8_REMEDY) from error
        yield text if position else text.removeprefix("\ufeff")
        if not block:
            return
        position += len(block)


def _parse_line(line: bytes, where: str) -> dict[str, object]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError("line is not UTF-8", where=where, remedy=_UTF8_REMEDY) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"line is not JSON: {error}", where=where, remedy=_JSONL_REMEDY) from error
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise DataError(f"line holds a JSON {kind}, not an object", where=where, remedy=_JSONL_REMEDY)
    return record


def _text_of(record: dict[str, object], json_key: str, where: str) -> str:
    if json_key not in record:
        near = difflib.get_close_matches(json_key, record, n=1) or sorted(record)[:5]
        remedy = f"name the key that holds the text (--json_key); the line has {', '.join(map(repr, near))}"
        raise DataError(f"line has no key {json_key!r}", where=where, remedy=remedy)
    text = record[json_key]
    if not isinstance(text, str):
        what = f"{json_key!r} holds a {type(text).__name__}, not a string"
        raise DataError(what, where=where, remedy="name the key that holds the text (--json_key)")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"{json_key!r} holds half of a surrogate pair, which is not text"
        raise DataError(what, where=where, remedy="repair the \\u escapes of this line") from error
    return text


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], io.BufferedReader]]:
    """`path` uncompressed, and the file beneath, whose position tells the progress."""
    try:
        with path.open("rb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile(fileobj=raw) as stream:
                    yield io.BufferedReader(stream), raw
            else:
                yield raw, raw
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        what = f"gzip file is damaged or cut short: {error}"
        raise DataError(what, where=str(path), remedy="fetch or compress it again") from error
    except OSError as error:
        raise DataError(f"input cannot be read: {error.strerror}", where=str(path)) from error


def _kind(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def _is_text(path: Path) -> bool:
    return path.name.endswith(SUFFIXES)


def _nearest_sibling(path: Path) -> str:
    siblings = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return f"did you mean {path.parent / near[0]}?" if near else "check the path"


_SUFFIX_REMEDY = f"name files that end in {', '.join(SUFFIXES)}"
_JSONL_REMEDY = "each line must be one JSON object"
_UTF8_REMEDY = "convert it to UTF-8, for example with iconv"
