"""Reads of whole tensors from a file, with read-ahead of the tensor that follows in the file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import final

import torch

from headwater.core.checked_files import CHUNK_BYTES, FileBytes
from headwater.core.transfers import Read, read_ahead


@final
class FileOrder:
    """Reads tensors of one file in pieces. If they are requested in file order, the next one is read ahead.

    A program that loads a state dict requests one tensor after another, and announces none. So
    this class works like the read-ahead of a disk: after two requests in file order, it reads the tensor that
    follows. These bytes are dropped if another tensor is requested instead.

    Args:
        file: the file.
        spans: name -> offset in the file and number of bytes, of the tensors that it reads.
    """

    def __init__(self, file: FileBytes, spans: Mapping[str, tuple[int, int]]) -> None:
        self._file = file
        self._spans = spans
        self._order = sorted(spans, key=lambda name: spans[name])
        self._number = {name: number for number, name in enumerate(self._order)}
        self._last: int | None = None
        # At most one entry: the tensor that is read ahead, and its reads. A thread that uses it removes it.
        self._ahead: dict[int, Iterator[torch.Tensor]] = {}
        self._of_other_process: dict[int, Iterator[torch.Tensor]] = {}
        self._process = os.getpid()

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the bytes of a tensor, uint8, in pieces of `CHUNK_BYTES`; the last may be shorter.

        A piece is valid until the next one of this file is requested.

        Args:
            name: the tensor.

        Raises:
            CorruptError: if the bytes are not those that were written.
        """
        self._begin_again_after_fork()
        number = self._number[name]
        reads = self._ahead.pop(number, None)
        continues = reads is not None or self._last == number - 1
        if reads is None:
            self._ahead.clear()
            names = self._order[number:] if continues else [name]
            reads = read_ahead(_reads(self._file, names, self._spans))
        yield from islice(reads, -(-self._spans[name][1] // CHUNK_BYTES))
        # Set only now: if the caller stops inside this tensor, the next one cannot be predicted.
        self._last = number
        if continues and number + 1 < len(self._order):
            self._ahead[number + 1] = reads

    def _begin_again_after_fork(self) -> None:
        if self._process != os.getpid():
            # The threads of these reads are in the process that has forked. The reads are kept, because
            # closing them takes locks that those threads may have held at the fork.
            self._of_other_process = self._ahead
            self._process, self._ahead, self._last = os.getpid(), {}, None


def _reads(file: FileBytes, names: Iterable[str], spans: Mapping[str, tuple[int, int]]) -> Iterator[Read]:
    """Yield the reads of tensors, one after the other."""
    # Not a method: what a `FileOrder` reads ahead must not refer to it, or both would stay in memory.
    for name in names:
        offset, count = spans[name]
        for first in range(0, count, CHUNK_BYTES):
            length = min(CHUNK_BYTES, count - first)
            yield length, partial(_read, file, offset + first, length, f"tensor {name}")


def _read(file: FileBytes, low: int, count: int, what: str, buffer: torch.Tensor) -> torch.Tensor:
    return file.read_padded(low, count, buffer, what)
