"""Packing: turns text into tokens and tokens into samples, and chooses the examples of each sample."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

from headwater.core.errors import DataError
from headwater.core.seeding import derive_seed
from headwater.core.units import counted
from headwater.data.documents import Piece
from headwater.data.examples import Block, Places
from headwater.data.modes import Packing
from headwater.data.modes.base import Tokens
from headwater.data.order import Indices, permutation
from headwater.data.sample_file import BLOCK_SAMPLES, Samples, make_samples, write_sample_file
from headwater.data.tokenizer import vocabulary_size
from headwater.data.words import TextEncoder

Item = TypeVar("Item")

# This must not depend on the number of workers, because modes seed random choices by the number of the task.
_TASK_CHARS = 1 << 20
"""Characters or bytes at which a task is complete."""


def numbered_tasks(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[tuple[int, list[Item]]]:
    """Yield numbered tasks: lists of pieces or records with about the same total size.

    Args:
        items: pieces or records, in order.
        size: returns the size of an item in characters or bytes.
    """
    number, total = 0, 0
    block: list[Item] = []
    for item in items:
        block.append(item)
        total += size(item)
        if total >= _TASK_CHARS:
            yield number, block
            number, total, block = number + 1, 0, []
    if block:
        yield number, block


@dataclasses.dataclass(frozen=True)
class Encode:
    """First pass for running text: turns pieces into int32 tokens; runs in worker processes.

    The end-of-text token follows each document.
    """

    tokenizer_json: str
    end_of_text_id: int

    @functools.cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder(Tokenizer.from_str(self.tokenizer_json))

    @functools.cached_property
    def _vocab_size(self) -> int:
        return vocabulary_size(self._encoder.tokenizer)

    def __call__(self, task: tuple[int, Sequence[Piece]]) -> Block:
        _, pieces = task
        end = np.array([self.end_of_text_id], dtype=np.int32)
        parts = []
        texts, continued = [piece.text for piece in pieces], [not piece.begins_document for piece in pieces]
        for piece, tokens in zip(pieces, self._encoder(texts, continued), strict=True):
            parts += [tokens, end] if piece.ends_document else [tokens]
        values = np.concatenate(parts)
        counts = collections.Counter(
            documents=sum(piece.ends_document for piece in pieces),
            text_bytes=sum(piece.text_bytes for piece in pieces),
        )
        token_counts = np.bincount(values, minlength=self._vocab_size)
        return Block(values, np.empty((0, 1), dtype=np.int32), token_counts, counts)


@dataclasses.dataclass(frozen=True)
class WriteSamples:
    """Second pass for running text: writes samples of the corpus to an HDF5 file; runs in workers."""

    corpus_path: Path
    sequence_length: int

    def __call__(self, task: tuple[Path, Indices]) -> int:
        path, samples = task
        with self.corpus_path.open("rb") as corpus:
            blocks = (
                make_samples(self._windows(corpus.fileno(), samples[start : start + BLOCK_SAMPLES]))
                for start in range(0, len(samples), BLOCK_SAMPLES)
            )
            write_sample_file(path, blocks, len(samples))
        return len(samples)

    def _windows(self, descriptor: int, samples: Indices) -> Samples:
        """Return the tokens of the given samples, [samples, sequence_length + 1].

        The file is read instead of memory-mapped, so that resident memory does not grow.
        """
        itemsize, length = np.dtype(np.int32).itemsize, self.sequence_length
        parts = [
            os.pread(descriptor, itemsize * (length + 1), itemsize * length * int(sample))
            for sample in samples
        ]
        return np.frombuffer(b"".join(parts), dtype=np.int32).reshape(len(samples), length + 1)


def pack(sizes: Indices, capacity: int) -> tuple[Indices, Indices]:
    """Pack examples into few samples with the best-fit-decreasing heuristic of bin packing.

    Args:
        sizes: size of each example in tokens, [examples]; at most `capacity`.
        capacity: tokens per sample.

    Returns:
        Numbers of the examples, grouped by sample, [examples]; and for each sample the position after its
        last example in this list, [samples].
    """
    sample_of = np.empty(len(sizes), dtype=np.int64)
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    count = 0
    # The sort is stable: the order of equal sizes, and so every file, must not depend on the algorithm.
    for example in np.argsort(-sizes, kind="stable"):
        size = int(sizes[example])
        at = bisect.bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            sample = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        else:
            sample, room, count = count, capacity, count + 1
        sample_of[example] = sample
        if room - size not in with_room:
            with_room[room - size] = []
            bisect.insort(rooms, room - size)
        with_room[room - size].append(sample)
    return np.argsort(sample_of, kind="stable"), np.cumsum(np.bincount(sample_of, minlength=count))


def arrange(lengths: Tokens, capacity: int, packing: Packing | None) -> tuple[Places, int]:
    """Choose which examples each sample holds: several with packing, otherwise one.

    Args:
        lengths: lengths of the rows of each example, in the order of the file of values,
            [examples, rows of an example].
        capacity: tokens per sample.
        packing: packing of texts in rows of tokens; `None` for other samples, which hold one example each.

    Returns:
        The places of the samples' examples, and the number of padding positions in all samples; 0 if samples
        are not rows of tokens.
    """
    starts = np.cumsum(lengths.sum(1), dtype=np.int64) - lengths.sum(1)
    numbers = np.arange(len(lengths))
    ends = numbers + 1
    joined = packing == "joined"
    # The last token of a text is only a label and takes no position. In joined texts this is true only of the
    # last token of the last text; `capacity + joined` below accounts for it.
    sizes = lengths[:, 0].astype(np.int64) - (not joined)
    if packing in ("joined", "apart"):
        numbers, ends = pack(sizes, capacity + joined)
    places = Places(numbers, starts[numbers], lengths[numbers], ends)
    filled = int(sizes.sum()) - len(places) * joined
    return places, len(places) * capacity - filled if packing is not None else 0


def split_samples(
    num_samples: int, val_fraction: float, seed: int, *, where: str | None = None
) -> dict[str, Indices]:
    """Return the sample numbers of `train` and of `val`, each in random order.

    Args:
        num_samples: number of samples to split.
        val_fraction: fraction of the samples for `val`; at least one sample unless it is 0.
        seed: seed of the order.
        where: the inputs of the samples, for the error.

    Raises:
        DataError: if no sample would be left for `train`.
    """
    num_val = max(1, round(num_samples * val_fraction)) if val_fraction else 0
    if num_samples - num_val < 1:
        made = counted(num_samples, "sample", "samples")
        what = f"too little text: it makes {made}, too few for training and validation"
        remedy = "use more text, a smaller sequence_length or a smaller val_fraction"
        raise DataError(what, where=where, remedy=remedy)
    order = permutation(num_samples, derive_seed(seed, "split"))
    return {"train": order[num_val:], "val": order[:num_val]}
