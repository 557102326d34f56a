"""Durable files with an optional checksum for every chunk, which is compared when the chunk is read."""

from __future__ import annotations

import functools
import json
import os
import weakref
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch

from headwater.core.buffers import PAGE_BYTES, round_up
from headwater.core.errors import CheckpointError, CorruptError
from headwater.core.files import disk_errors
from headwater.core.transfers import RUN_BYTES, WriteBehind, read_pages, write_all

CHUNK_BYTES = RUN_BYTES
"""Largest chunk with a checksum. Reading verifies whole chunks, so they are small."""

Chunk = tuple[int, int, int]
"""A chunk: offset in the file, length in bytes, CRC-32."""

BEHIND_BYTES = 1 << 18
"""Smallest chunk that a thread writes, through a buffer."""

OTHER_COPY = "use another checkpoint, or another copy of this one"


class CheckedFile:
    """Writes a file of known size, in any order, inside a context. At its end the file is on disk.

    Args:
        path: where it is created; an existing file is replaced.
        num_bytes: its size; the space is reserved at once.
        checksums: compute the checksum of each chunk; false for a format that cannot store them.

    Raises:
        DiskFullError: if there is too little space.
    """

    def __init__(self, path: Path, num_bytes: int, *, checksums: bool = True) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self._checksums = checksums
        self._chunks: list[Chunk] = []
        self._behind: WriteBehind | None = None
        with disk_errors(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
            try:
                if num_bytes:
                    # A full disk is an error now, not in the middle of a checkpoint.
                    os.posix_fallocate(self._fd, 0, num_bytes)
            finally:
                os.close(self._fd)

    @property
    def chunks(self) -> list[Chunk]:
        """Offset, length and checksum of each chunk, in file order; blocks until all are written."""
        assert self._checksums, "this file is written without checksums"
        if self._behind is not None:
            with disk_errors(self.path):
                self._behind.drain()
        return sorted(self._chunks)

    def __enter__(self) -> Self:
        with disk_errors(self.path):
            self._fd = os.open(self.path, os.O_RDWR)
        return self

    def put(self, offset: int, data: memoryview) -> None:
        """Write bytes at `offset`, perhaps on a thread after this call returns. Write each byte only once.

        Raises:
            StoreError: if this or an earlier write has failed.
        """
        with disk_errors(self.path):
            for first in range(0, len(data), CHUNK_BYTES):
                chunk = data[first : first + CHUNK_BYTES]
                if len(chunk) < BEHIND_BYTES:
                    write_all(self._fd, offset + first, chunk)
                    if self._checksums:
                        self._note(offset + first, len(chunk), zlib.crc32(chunk))
                else:
                    written = self._note if self._checksums else None
                    self._behind = self._behind or WriteBehind(self.path, self._fd, written)
                    self._behind.write(offset + first, chunk)

    def put_zeros(self, offset: int, count: int) -> None:
        """Write zeros at `offset`: note their checksum. The reserved space holds zeros already."""
        for first in range(offset, offset + count, CHUNK_BYTES):
            length = min(CHUNK_BYTES, offset + count - first)
            self._note(first, length, _checksum_of_zeros(length))

    def _note(self, offset: int, length: int, checksum: int) -> None:
        self._chunks.append((offset, length, checksum))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        behind, self._behind = self._behind, None
        with disk_errors(self.path):
            try:
                if kind is None:
                    if behind is not None:
                        behind.drain()
                    os.fsync(self._fd)
            finally:
                # Before the descriptor is closed: then another file may get its number.
                if behind is not None:
                    behind.abandon()
                os.close(self._fd)


@functools.lru_cache(maxsize=16)
def _checksum_of_zeros(count: int) -> int:
    return zlib.crc32(bytes(count))


def json_checksum(content: object) -> int:
    """Return the CRC-32 of a value as JSON, which depends neither on the order of keys nor on white space."""
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


class FileBytes:
    """Reads an existing file, and compares what is read with checksums if they are known.

    Args:
        path: the file.
        chunks: checksums of all its bytes, in file order.
        hold: keep the file open, so that it is still read if another file takes its name.

    Raises:
        CheckpointError: if the file is missing.
        CorruptError: if its length is not that of the chunks.
    """

    def __init__(self, path: Path, chunks: Sequence[Chunk] | None = None, *, hold: bool = False) -> None:
        if not path.is_file():
            raise CheckpointError("the file is missing", where=str(path), remedy=OTHER_COPY)
        self.path = path
        self._held: int | None = None
        if hold:
            with disk_errors(path):
                self._held = os.open(path, os.O_RDONLY)
            # Closed with the last tensor that reads it; no caller knows when that is.
            weakref.finalize(self, os.close, self._held)
        self.num_bytes = (path.stat() if self._held is None else os.fstat(self._held)).st_size
        self._chunks: Sequence[Chunk] | None = None
        # A chunk that was read in part: its rest may be read next.
        self._last: tuple[Chunk, bytearray] | None = None
        if chunks is not None:
            self.expect(chunks)

    def expect(self, chunks: Sequence[Chunk]) -> None:
        """Compare all bytes that are read from now on with their checksums.

        Args:
            chunks: checksums of all bytes of the file, in file order.

        Raises:
            CorruptError: if the file's length is not that of the chunks.
        """
        self._chunks = chunks
        path, written = self.path, sum(length for _, length, _ in chunks)
        if self.num_bytes != written:
            kind = "truncated" if self.num_bytes < written else "too long"
            raise CorruptError(
                f"the file is {kind}: expected {written} bytes, found {self.num_bytes}",
                where=str(path),
                remedy=OTHER_COPY,
            )

    def read(self, low: int, count: int, what: str) -> bytes:
        """Return `count` bytes from offset `low` on; see `read_into`."""
        data = bytearray(count)
        self.read_into(low, memoryview(data), what)
        return bytes(data)

    def read_into(self, low: int, into: memoryview, what: str) -> None:
        """Fill `into` with the bytes from offset `low` on. Several threads may call it at once.

        Args:
            low: offset in the file.
            into: writable memory.
            what: name of the bytes, for errors.

        Raises:
            CorruptError: if the bytes are not those that were written.
        """
        if self._chunks is None:
            self._read(low, into, what)
            return
        high = low + len(into)
        for chunk in _chunks_of(self._chunks, low, high):
            offset, length, _ = chunk
            start, stop = max(low, offset), min(high, offset + length)
            part = into[start - low : stop - low]
            if stop - start == length:
                self._read_chunk(chunk, part, what)
            else:
                data = self._whole(chunk, what)
                part[:] = data[start - offset : stop - offset]
                # If the run ends inside this chunk, the next run usually begins in it.
                self._last = (chunk, data) if high < offset + length else None

    def read_padded(self, low: int, count: int, buffer: torch.Tensor, what: str) -> torch.Tensor:
        """Return `count` bytes from offset `low` on, past the page cache if possible; see `read_into`.

        Args:
            low: offset in the file.
            count: number of bytes.
            buffer: page-aligned uint8 memory, `PADDING_BYTES` larger than `count`.
            what: name of the bytes, for errors.

        Returns:
            The part of `buffer` with the bytes.

        Raises:
            CorruptError: if the bytes are not those that were written.
        """
        before = low % PAGE_BYTES
        part = buffer[before : before + count]
        chunks = self._whole_chunks(low, count)
        pages = buffer[: round_up(before + count)]
        with disk_errors(self.path):
            path = str(self.path) if self._held is None else f"/proc/self/fd/{self._held}"
            done = chunks is not None and read_pages(path, low - before, pages, before + count)
        if chunks is None or not done:
            self.read_into(low, part.numpy().data, what)
            return part
        for chunk in chunks:
            first = chunk[0] - low
            self._check(chunk, part[first : first + chunk[1]].numpy().data, what)
        return part

    def _whole_chunks(self, low: int, count: int) -> Sequence[Chunk] | None:
        """Return the chunks that make up a run; `None` if the run begins or ends within a chunk."""
        if self._chunks is None:
            return ()
        chunks = _chunks_of(self._chunks, low, low + count)
        whole = chunks and (chunks[0][0], sum(chunks[-1][:2])) == (low, low + count)
        return chunks if whole else None

    def _whole(self, chunk: Chunk, what: str) -> bytearray:
        """Return the bytes of a chunk."""
        last = self._last  # once: another thread may replace it
        if last is not None and last[0] == chunk:
            return last[1]
        data = bytearray(chunk[1])
        self._read_chunk(chunk, memoryview(data), what)
        return data

    def _read_chunk(self, chunk: Chunk, into: memoryview, what: str) -> None:
        self._read(chunk[0], into, what)
        self._check(chunk, into, what)

    def _check(self, chunk: Chunk, data: memoryview, what: str) -> None:
        """Compare the bytes of a chunk with its checksum."""
        offset, length, checksum = chunk
        if zlib.crc32(data) != checksum:
            raise CorruptError(
                f"{what}: bytes {offset} to {offset + length} of the file differ from what was written",
                where=str(self.path),
                remedy=OTHER_COPY,
            )

    def _read(self, low: int, into: memoryview, what: str) -> None:
        with disk_errors(self.path), self._opened() as file:
            done = 0
            while done < len(into):
                # One call reads 2 GiB at most.
                count = os.preadv(file, [into[done:]], low + done)
                if count == 0:
                    raise CorruptError(
                        f"{what}: the file is truncated", where=str(self.path), remedy=OTHER_COPY
                    )
                done += count

    @contextmanager
    def _opened(self) -> Iterator[int]:
        if self._held is not None:
            yield self._held
            return
        with self.path.open("rb") as file:
            yield file.fileno()


def _chunks_of(chunks: Sequence[Chunk], low: int, high: int) -> Sequence[Chunk]:
    """Return the chunks that hold the bytes from `low` to `high`, which are in the file."""
    first = bisect_right(chunks, low, key=lambda chunk: chunk[0]) - 1
    return chunks[first : bisect_left(chunks, high, key=lambda chunk: chunk[0])]
