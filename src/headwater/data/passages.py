"""Passages: parts of documents that are short enough for an encoder, and their tokens."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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


def titled(tokenizer: Tokenizer, title: str, text: str, length: int) -> str | tuple[str, str]:
    """Return the input of a tokenizer for a passage with its title, in training and in an index.

    As in DPR, this is the pair of title and text if the tokenizer puts a separator between the two. Otherwise
    it is one text.

    Args:
        tokenizer: the tokenizer.
        title: title of the document, or an empty string.
        text: text of the passage, or an empty string.
        length: tokens that the encoder reads. Title and text each have room for half of them.
    """
    if not title or not text:
        return title or text
    # One more token may be added: the end-of-text token.
    special = tokenizer.num_special_tokens_to_add(True)
    title = _first_part(tokenizer, title, (length - special - 1) // 2)
    if not title:
        return text
    has_separator = special > tokenizer.num_special_tokens_to_add(False)
    return (title, text) if has_separator else f"{title} {text}"


def _first_part(tokenizer: Tokenizer, text: str, most: int) -> str:
    """Return the beginning of a text, which has about `most` tokens, or the whole text if it has fewer."""
    if len(text.encode()) <= most:  # a token has at least one byte
        return text
    encoded = tokenizer.encode(text, add_special_tokens=False)
    if len(encoded.ids) <= most:
        return text
    return text[: encoded.offsets[most - 1][1]] if most > 0 else ""


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
                yield Passage(part, "", _printable(str(path)))
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
                yield Passage(part, title, _printable(record.where))


def _printable(source: str) -> str:
    """Return a place in a file, with an escape for each byte of the file's name that is not UTF-8."""
    return os.fsencode(source).decode("utf-8", "backslashreplace")


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
