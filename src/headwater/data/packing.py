"""The two kinds of work that workers do: pieces of text to tokens, tokens to files of packed samples."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from headwater.core.errors import DataError
from headwater.core.seeding import derive_seed
from headwater.data.documents import Piece
from headwater.data.order import Indices, permutation
from headwater.data.sample_file import Samples, make_samples, write_sample_file

_TASK_CHARS = 1 << 20
"""Characters that one task tokenizes, at least."""

_BLOCK_SAMPLES = 64
"""Samples that are in memory at once while a file is written."""


def task_blocks(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces in lists of about equal length in characters, each the work of one task."""
    block: list[Piece] = []
    chars = 0
    for piece in pieces:
        block.append(piece)
        chars += len(piece.text)
        if chars >= _TASK_CHARS:
            yield block
            block, chars = [], 0
    if block:
        yield block


@dataclasses.dataclass(frozen=True)
class Encode:
    """Pieces to int32 tokens, with the end-of-text token after each document; runs in workers."""

    tokenizer_json: str
    end_of_text_id: int

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_str(self.tokenizer_json)

    def __call__(self, pieces: Sequence[Piece]) -> npt.NDArray[np.int32]:
        tokens: list[int] = []
        encodings = self._tokenizer.encode_batch_fast(
            [piece.text for piece in pieces], add_special_tokens=False
        )
        for piece, encoding in zip(pieces, encodings, strict=True):
            tokens += encoding.ids
            if piece.ends_document:
                tokens.append(self.end_of_text_id)
        return np.array(tokens, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class WriteSamples:
    """Cuts the given samples out of a corpus file and writes them as one HDF5 file; runs in workers."""

    corpus_path: Path
    sequence_length: int

    def __call__(self, task: tuple[Path, Indices]) -> int:
        path, samples = task
        with self.corpus_path.open("rb") as corpus:
            blocks = (
                make_samples(self._windows(corpus.fileno(), samples[start : start + _BLOCK_SAMPLES]))
                for start in range(0, len(samples), _BLOCK_SAMPLES)
            )
            write_sample_file(path, blocks, len(samples), self.sequence_length)
        return len(samples)

    def _windows(self, descriptor: int, samples: Indices) -> Samples:
        """Tokens [samples, sequence_length + 1]; read, not mapped, so that resident memory stays flat."""
        itemsize, length = np.dtype(np.int32).itemsize, self.sequence_length
        parts = [
            os.pread(descriptor, itemsize * (length + 1), itemsize * length * int(sample))
            for sample in samples
        ]
        return np.frombuffer(b"".join(parts), dtype=np.int32).reshape(len(samples), length + 1)


def split_samples(num_samples: int, val_fraction: float, seed: int) -> dict[str, Indices]:
    """Sample numbers of `train` and `val`, each in random order.

    Raises:
        DataError: if one of them would be empty.
    """
    num_val = max(1, round(num_samples * val_fraction)) if val_fraction else 0
    if num_samples - num_val < 1:
        what = f"too little text: it makes {num_samples} samples, too few for training and validation"
        remedy = "give more text, a smaller sequence_length, or a smaller val_fraction"
        raise DataError(what, remedy=remedy)
    order = permutation(num_samples, derive_seed(seed, "split"))
    return {"train": order[num_val:], "val": order[:num_val]}
