"""Passages: parts of documents that are short enough for an encoder, and their tokens."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from headwater.core.errors import DataError
from headwater.data.documents import text_blocks
from headwater.data.raw_records import (
    RECORD_KINDS,
    BadRecords,
    checked_text,
    file_kind,
    read_records,
    text_of,
)

PASSAGE_WORDS = 100
"""Words of a passage, as in DPR (arXiv:2004.04906)."""

_TITLE_WORDS = 20
"""Most words of a title, which is encoded with each passage of its document."""

_LONGEST_WORD = 32
"""Characters that count as a word where a text has no spaces."""


@dataclasses.dataclass(frozen=True)
class Passage:
    """A part of a document.

    Attributes:
        text: its text.
        title: title of the document, or an empty string.
        source: file of the document, with the line or record.
    """

    text: str
    title: str
    source: str

    @property
    def encoded_text(self) -> str:
        """The text that an encoder reads."""
        return titled(self.title, self.text)


def titled(title: str, text: str) -> str:
    """Return a passage with its title, as DPR reads it in training and in an index."""
    return " ".join(part for part in (title, text) if part)


def read_passages(
    files: Sequence[Path],
    *,
    num_words: int = PASSAGE_WORDS,
    json_key: str = "text",
    bad: BadRecords | None = None,
) -> Iterator[Passage]:
    """Yield the passages of all documents in order. One document, or a block of a txt file, is in memory.

    A txt file is one document. In other files each record is one document, with an optional `title`.

    Args:
        files: the files; see `find_inputs`.
        num_words: words of a passage; the last one of a document may have fewer.
        json_key: key of the text in records.
        bad: decides if a record that cannot be used is counted or an error; by default an error.

    Raises:
        DataError: if a file or record cannot be read.
    """
    bad = bad or BadRecords()
    for path in files:
        if file_kind(path) not in RECORD_KINDS:
            for part in cut_passages(text_blocks(path), num_words):
                yield Passage(part, "", str(path))
            continue
        for record in read_records([path], bad):
            try:
                text = text_of(record, json_key)
                title = checked_text(record.fields.get("title") or "", "title", record.where)
            except DataError as error:
                bad.add(error)
                continue
            title = " ".join(title.split()[:_TITLE_WORDS])
            for part in cut_passages([text], num_words):
                yield Passage(part, title, record.where)


def cut_passages(blocks: Iterable[str], num_words: int) -> Iterator[str]:
    """Yield a text in parts of `num_words` words, without white space around them.

    Args:
        blocks: the text, in any number of parts.
        num_words: words of each part except the last.
    """
    # A word counts when its end is known: at white space, or where it is cut.
    word = rf"(?:\S{{{_LONGEST_WORD}}}\s*+|\S{{1,{_LONGEST_WORD - 1}}}\s++)"
    passage = re.compile(rf"\s*+{word}{{{num_words}}}")
    held = ""
    for block in blocks:
        held, start = held + block, 0
        while (found := passage.match(held, start)) is not None:
            yield found[0].strip()
            start = found.end()
        held = held[start:].lstrip()
    if held.strip():
        yield held.strip()


def halves(passage: Passage) -> tuple[Passage, Passage]:
    """Return the two halves of a passage of at least two characters, cut between words if it has several."""
    text, middle = passage.text, len(passage.text) // 2
    gaps = (match.start() for match in re.finditer(r"\s+", text))
    cut = min(gaps, key=lambda gap: abs(gap - middle), default=middle)
    first, second = (dataclasses.replace(passage, text=part.strip()) for part in (text[:cut], text[cut:]))
    return first, second


def ended(tokens: Sequence[int], end: int) -> list[int]:
    """Return the tokens of a text with the end-of-text token as the last one."""
    return [*tokens] if tokens and tokens[-1] == end else [*tokens, end]


def first_tokens(tokens: Sequence[int], length: int) -> list[int]:
    """Return at most `length` tokens of a text: its beginning, and its end token."""
    return [*tokens] if len(tokens) <= length else [*tokens[: length - 1], tokens[-1]]
