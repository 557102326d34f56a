"""MinHash signatures: the share of equal numbers in two signatures estimates the similarity of two texts.

The n-grams are those of SlimPajama: characters of the text in lower case, without punctuation. The library
datasketch makes the signature from hashes of the n-grams.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.data.documents import Piece
from headwater.data.examples import Block

PERMUTATIONS = 128
"""Numbers of a signature."""

EMPTY = np.uint32(0xFFFFFFFF)
"""All numbers of the signature of a text without n-grams."""

_BATCH = 2048
"""n-grams that are hashed at once: 1 MiB of arrays, whereas a whole text could take gigabytes."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio, an odd factor for hashes by multiplication."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SPACE = re.compile(r"\s+")


def normalized(text: str) -> str:
    """Return a text in lower case, without ASCII punctuation, with one space for each run of white space."""
    return _SPACE.sub(" ", text.lower().translate(_PUNCTUATION))


def overlapping(pieces: Iterable[Piece], ngram: int) -> Iterator[Piece]:
    """Yield pieces that begin with the last `ngram` - 1 characters before them in the normalized document.

    The n-grams of these pieces are the n-grams of the document, so that each piece can be hashed alone.
    """
    before = ""
    for piece in pieces:
        text = before + piece.text
        yield dataclasses.replace(piece, text=text)
        text = "" if piece.ends_document else normalized(text)
        before = text[max(0, len(text) - ngram + 1) :]


def hashed_ngrams(piece: Piece, ngram: int) -> Iterator[npt.NDArray[np.uint64]]:
    """Yield 32-bit hashes of the n-grams of a piece, in batches.

    A text shorter than an n-gram is one n-gram. An empty text has no n-grams.
    """
    text = normalized(piece.text)
    text = text.lstrip() if piece.begins_document else text
    text = text.rstrip() if piece.ends_document else text
    length = min(ngram, len(text))
    for start in range(0, len(text) - length + 1 if text else 0, _BATCH):
        part = text[start : start + _BATCH + length - 1]
        letters = np.frombuffer(part.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        hashes = np.zeros(len(part) - length + 1, dtype=np.uint64)
        for place in range(length):
            # The product comes last: only its high bits depend on all letters.
            hashes = (hashes + letters[place : place + len(hashes)]) * _FACTOR
        yield hashes >> np.uint64(32)


@dataclasses.dataclass(frozen=True)
class Sign:
    """Computes the signatures of a numbered task of overlapping pieces; runs in worker processes.

    The values of the block are the signatures, [pieces, PERMUTATIONS]. Its lengths are 1 for each piece that
    begins a document and 0 for other pieces, [pieces, 1].

    Attributes:
        ngram: characters of an n-gram.
    """

    ngram: int

    def __call__(self, task: tuple[int, Sequence[Piece]]) -> Block:
        _, pieces = task
        signatures = np.stack([self._signature(piece) for piece in pieces])
        begins = np.array([[piece.begins_document] for piece in pieces], dtype=np.int32)
        no_tokens = np.zeros(0, dtype=np.int64)
        return Block(signatures.view(np.int32).ravel(), begins, no_tokens, collections.Counter())

    def _signature(self, piece: Piece) -> npt.NDArray[np.uint32]:
        minhash = self._minhash
        minhash.clear()
        for hashes in hashed_ngrams(piece, self.ngram):
            minhash.update_batch(hashes.tolist())
        return np.asarray(minhash.hashvalues, dtype=np.uint32)

    @functools.cached_property
    def _minhash(self) -> Any:
        """Object that is used for one text after another, because drawing its permutations takes long."""
        from datasketch import MinHash

        return MinHash(num_perm=PERMUTATIONS, hashfunc=int)
