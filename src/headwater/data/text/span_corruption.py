"""Span corruption, the pretraining of T5: the model writes the spans that were removed from a text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headwater.config.data import SpanCorruptionDataConfig
from headwater.config.models.seq2seq import Seq2SeqConfig
from headwater.core.errors import DataError
from headwater.core.seeding import derive_seed
from headwater.data.loader import Batch
from headwater.data.text.lines import read_lines
from headwater.data.text.tokens import (
    PairFiller,
    TokenLists,
    Tokens,
    encoded,
    listed_files,
    open_vocabulary,
    text_files,
)

_CORRUPTED_SHARE = 0.15
_SPAN_LENGTH = 3
"""Mean length of a span (arXiv:1910.10683, section 3.3.4)."""


def span_counts(length: int) -> tuple[int, int]:
    """Return how many tokens are removed from a text of `length` tokens, and in how many spans."""
    left_out = min(max(round(length * _CORRUPTED_SHARE), 1), length - 1)
    spans = min(max(round(left_out / _SPAN_LENGTH), 1), length - left_out)
    return left_out, spans


def longest_text(source_length: int, target_length: int) -> int:
    """Return the most tokens that a text may have so that its source and its target fit, with end tokens."""

    def fits(length: int) -> bool:
        left_out, spans = span_counts(length)
        return length - left_out + spans < source_length and left_out + spans < target_length

    return next(length for length in itertools.count(2) if not fits(length + 1))


def corrupt(tokens: Tokens, first_sentinel: int, generator: np.random.Generator) -> tuple[Tokens, Tokens]:
    """Remove random spans from a text (arXiv:1910.10683, sections 3.1.4 and 3.3.4).

    Kept tokens and removed tokens are each cut into the same number of parts, which alternate; the text
    begins with kept tokens. A part has at least one token, and all such cuts are equally likely.

    Args:
        tokens: tokens of the text, two or more.
        first_sentinel: id of the sentinel of the first span; each further sentinel is one less.
        generator: source of the cuts.

    Returns:
        The source: kept tokens, with each span replaced by a sentinel. The target: each sentinel, followed by
        its span.
    """
    left_out, spans = span_counts(len(tokens))
    kept = _cut(len(tokens) - left_out, spans, generator)
    hidden = _cut(left_out, spans, generator)
    ends = np.cumsum(np.stack((kept, hidden), axis=1).ravel())
    parts = np.split(tokens, ends[:-1])
    read: list[npt.ArrayLike] = []
    write: list[npt.ArrayLike] = []
    for span in range(spans):
        sentinel = [first_sentinel - span]
        read += [parts[2 * span], sentinel]
        write += [sentinel, parts[2 * span + 1]]
    return _joined(read), _joined(write)


def _cut(total: int, parts: int, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return random sizes of `parts` parts of `total` tokens, each at least 1."""
    cuts = np.sort(generator.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)


def _joined(parts: Sequence[npt.ArrayLike]) -> Tokens:
    return np.concatenate([np.asarray(part, dtype=np.int32) for part in parts])


class CorruptedTexts:
    """A data set of pieces of texts, with different removed spans in every epoch.

    `PairFiller.fill` describes a batch.

    Args:
        texts: pieces of two tokens or more.
        first_sentinel: id of the sentinel of the first span, see `corrupt`.
        filler: maker of batches.
        seed: seed of the removed spans.
    """

    def __init__(self, texts: TokenLists, first_sentinel: int, filler: PairFiller, seed: int) -> None:
        self.texts = texts
        self._first_sentinel, self._filler, self._seed = first_sentinel, filler, seed

    @property
    def sequence_length(self) -> int:
        """Tokens of a source."""
        return self._filler.source_length

    def __len__(self) -> int:
        return len(self.texts)

    def __getitems__(self, draws: Sequence[int]) -> Batch:
        """Return the batch of these draws (numbers of samples; see `headwater.data.source.Samples`)."""
        return self._filler.fill([self._pair(draw) for draw in draws])

    def _pair(self, draw: int) -> tuple[Tokens, Tokens]:
        generator = np.random.default_rng(derive_seed(self._seed, "spans", draw))
        read, write = corrupt(self.texts[draw % len(self)], self._first_sentinel, generator)
        return np.append(read, np.int32(self._filler.end)), write


def read_corrupted_texts(config: SpanCorruptionDataConfig, model: Seq2SeqConfig) -> CorruptedTexts:
    """Return the data set that a section of a params file describes; each line of the files is a text.

    Raises:
        DataError: if a file is missing, there are too few sentinels, or no text has two tokens.
    """
    vocabulary = open_vocabulary(config.src_vocab_file, config, model.source_tokens)
    length = longest_text(config.src_max_sequence_length, config.tgt_max_sequence_length)
    _, spans = span_counts(length)
    if spans > config.extra_ids:
        raise DataError(
            f"texts of {length} tokens have {spans} removed spans, but extra_ids is {config.extra_ids}",
            where=config.place,
            remedy=f"set extra_ids to {spans} or more, here and in the model's section",
        )
    lines = (line for place in config.src_data_dir for path in _files(place) for _, line in read_lines(path))
    texts = encoded(lines, vocabulary, lower=config.do_lower)
    together = config.num_documents_to_concatenate if config.pack_sequences else 1
    pieces = TokenLists(_pieces(texts, length, together))
    if not len(pieces):
        raise DataError(
            "no text has two or more tokens", where=config.place, remedy="set src_data_dir to other files"
        )
    first_sentinel = vocabulary.size + config.extra_ids - 1
    return CorruptedTexts(pieces, first_sentinel, PairFiller.of(config, vocabulary), config.shuffle_seed or 0)


def _files(place: Path) -> list[Path]:
    return list(itertools.chain(*listed_files(place))) or text_files(place)


def _pieces(texts: Iterator[list[int]], length: int, together: int) -> Iterator[list[int]]:
    """Join `together` texts at a time, and yield each joined text in pieces of at most `length` tokens."""
    while group := list(itertools.islice(texts, together)):
        joined = list(itertools.chain(*group))
        pieces = (joined[start : start + length] for start in range(0, len(joined), length))
        yield from (piece for piece in pieces if len(piece) > 1)
