"""Documents from text files and files of records, streamed in pieces."""

from __future__ import annotations

import codecs
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from headwater.core.errors import DataError
from headwater.core.names import nearest_sibling
from headwater.data.duplicates import Duplicates
from headwater.data.raw_records import (
    RECORD_KINDS,
    UTF8_REMEDY,
    BadRecords,
    file_kind,
    opened,
    read_records,
    text_of,
)

_MAY_BE_COMPRESSED = (".txt", ".jsonl", ".json", ".csv")
SUFFIXES = (*(f"{kind}{end}" for kind in _MAY_BE_COMPRESSED for end in ("", ".gz")), ".parquet")

PIECE_CHARS = 1 << 16
"""Maximum characters that are tokenized at once: tokenizers slow down on much longer strings."""

# Byte-level pre-tokenizers and SentencePiece always separate "word" from " word", so that a cut between the
# two does not change the tokens.
_CUT = re.compile(r"(?<=\w)(?= \w)")


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of one document, short enough to be tokenized at once.

    Attributes:
        text: the characters; never empty.
        ends_document: True for the last piece of a document.
        text_bytes: length of `text` in UTF-8.
        file_bytes: bytes of the input files read so far (compressed size), for the progress bar.
        begins_document: True for the first piece of a document.
    """

    text: str
    ends_document: bool
    text_bytes: int
    file_bytes: int
    begins_document: bool = True


def find_inputs(inputs: Sequence[Path]) -> list[Path]:
    """Return the files to read, in the order given; a folder stands for all input files below it, by path.

    Raises:
        DataError: if a path does not exist or has an unknown suffix, or a folder has no input files.
    """
    found: list[Path] = []
    for path in inputs:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and _is_text(file))
            if not inside:
                raise DataError("the folder has no input files", where=str(path), remedy=_SUFFIX_REMEDY)
            found += inside
        elif not path.exists():
            raise DataError("input does not exist", where=str(path), remedy=_path_remedy(path))
        elif not _is_text(path):
            raise DataError("input has an unknown file type", where=str(path), remedy=_SUFFIX_REMEDY)
        else:
            found.append(path)
    if not found:
        raise DataError("no input files given", remedy="name at least one file or folder of text")
    return found


def read_pieces(
    files: Sequence[Path],
    *,
    json_key: str = "text",
    bad: BadRecords | None = None,
    duplicates: Duplicates | None = None,
) -> Iterator[Piece]:
    """Yield every document of `files` in order, in pieces; empty documents are left out.

    A txt file is one document. In other files each record is one document. Memory holds one piece or record.

    Args:
        files: files to read.
        json_key: key of the text in records.
        bad: decides if a record that cannot be used is counted or an error; by default an error.
        duplicates: decides which documents are left out as duplicates; by default none.

    Raises:
        DataError: if a file or record cannot be read. The error names the line (jsonl) or byte (txt).
    """
    bad, duplicates = bad or BadRecords(), duplicates or Duplicates()
    done, begins = 0, True
    for path in files:
        if file_kind(path) in RECORD_KINDS:
            for record in read_records([path], bad):
                try:
                    text = text_of(record, json_key)
                except DataError as error:
                    bad.add(error)
                    continue
                if not duplicates.is_new([text]):
                    continue
                blocks = (text[start : start + PIECE_CHARS] for start in range(0, len(text), PIECE_CHARS))
                for piece, ends in cut_pieces(blocks):
                    yield Piece(piece, ends, len(piece.encode()), done + record.file_bytes, begins)
                    begins = ends
        elif duplicates.is_new(text_blocks(path)):
            with opened(path) as (stream, raw):
                for piece, ends in cut_pieces(_decoded(path, stream)):
                    yield Piece(piece, ends, len(piece.encode()), done + raw.tell(), begins)
                    begins = ends
        done += path.stat().st_size


def cut_pieces(blocks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield the pieces (text, ends_document) of one document; an empty document yields nothing."""
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
    """Return where to cut a text: at the last gap between words within `PIECE_CHARS`, or after that many."""
    # Nearly every text has a gap near the end, so that only few are searched from the beginning.
    for start in (PIECE_CHARS - 4096, 1):
        cuts = [match.start() for match in _CUT.finditer(text, start, PIECE_CHARS)]
        if cuts:
            return cuts[-1]
    return PIECE_CHARS


def text_blocks(path: Path) -> Iterator[str]:
    """Yield the text of a txt file in blocks."""
    with opened(path) as (stream, _):
        yield from _decoded(path, stream)


def _decoded(path: Path, stream: IO[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    while True:
        block = stream.read(PIECE_CHARS)
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            # The decoder still holds the first bytes of a character; the error counts from these.
            where = f"{path}, byte {position - pending + error.start}"
            raise DataError("text is not UTF-8", where=where, remedy=UTF8_REMEDY) from error
        yield text if position else text.removeprefix("\ufeff")
        if not block:
            return
        position += len(block)


def _is_text(path: Path) -> bool:
    return path.name.endswith(SUFFIXES)


def _path_remedy(path: Path) -> str:
    near = nearest_sibling(path)
    return "check the path" if near is None else f"did you mean {near}?"


_SUFFIX_REMEDY = f"name files that end in {', '.join(SUFFIXES)}"
