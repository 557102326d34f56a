"""Large reads and writes of files that threads carry out while the caller works on other bytes.

[Note: aligned parts]
A write past the page cache (O_DIRECT) needs whole pages: its offset, its length and its memory are multiples
of the page size. It takes a fraction of the processor time of a write through the page cache, and it does not
evict other files from memory. The runs of a checkpoint begin and end anywhere. So each run is copied to a
buffer in which its bytes have the same place in a page as in the file. The whole pages of the run are written
past the page cache. The bytes before and after them go through the page cache, because other runs have bytes
in the same pages. Thus each page is written in one of the two ways only. A read takes the whole pages that
hold a run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import final

import numpy
import torch

from headwater.core.buffers import PAGE_BYTES, aligned_empty
from headwater.core.cleanup import on_failure

RUN_BYTES = 4 << 20
"""Maximum length of a run that is written."""

_THREADS = 4
_WRITE_BUFFERS = 4
_READS_AHEAD = 3
_AHEAD_BYTES = 12 << 20
_SPARE_BUFFERS = _READS_AHEAD + 1
BUFFER_BYTES = _WRITE_BUFFERS * (RUN_BYTES + PAGE_BYTES)
"""Memory of all writes of the process together."""

Written = Callable[[int, int, int], None]
"""Called with offset, length and CRC-32 of a run."""

Read = tuple[int, Callable[[torch.Tensor], torch.Tensor]]
"""A number of bytes, and a function that reads them into a part of a padded buffer and returns that part."""

PADDING_BYTES = 2 * PAGE_BYTES
"""Bytes by which a padded buffer is larger than a run: it holds the whole pages that the run touches."""


@final
class Transfers:
    """Threads and buffers that all files of the process share; see `shared_transfers`.

    Attributes:
        threads: they read and write.
        buffers: the buffers of writes; a write blocks until one of them is free.
    """

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="headwater-file")
        self.buffers: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(_WRITE_BUFFERS):
            # Memory is used only when a buffer is written to.
            self.buffers.put(aligned_empty(RUN_BYTES + PAGE_BYTES))
        self._spare: deque[torch.Tensor] = deque(maxlen=_SPARE_BUFFERS)

    def take(self, count: int) -> torch.Tensor:
        """Return a padded buffer for a read of `count` bytes. It never blocks, unlike a write."""
        if count <= RUN_BYTES:
            # The first use of fresh memory takes longer than the read itself, so buffers are used again.
            with contextlib.suppress(IndexError):
                return self._spare.pop()
        return aligned_empty(max(count, RUN_BYTES) + PADDING_BYTES)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Keep a buffer of `take` for another read. The caller uses it no longer. A larger one is freed."""
        if buffer.numel() == RUN_BYTES + PADDING_BYTES:
            self._spare.append(buffer)


_shared: weakref.WeakValueDictionary[int, Transfers] = weakref.WeakValueDictionary()
"""By process, since a fork has no threads."""

_making = threading.Lock()


def shared_transfers() -> Transfers:
    """Return the transfers of this process. Their threads end when nothing refers to them any more."""
    with _making:
        found = _shared.get(os.getpid())
        if found is None:
            found = _shared[os.getpid()] = Transfers()
        return found


@final
class WriteBehind:
    """Writes of runs to one file, behind the caller; see [Note: aligned parts].

    Args:
        path: the file.
        file: its descriptor, open for writing.
        written: called for each run that was written, on any thread; no checksums are computed if not given.
    """

    def __init__(self, path: Path, file: int, written: Written | None) -> None:
        self._path = path
        self._file = file
        self._written = written
        self._transfers = shared_transfers()
        self._pending: deque[Future[None]] = deque()

    def write(self, offset: int, run: memoryview) -> None:
        """Copy a run of up to `RUN_BYTES`, and return before it is written.

        Raises:
            OSError: if an earlier write has failed.
        """
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
        buffer = self._transfers.buffers.get()
        # If one of these statements fails, the buffer is returned here. After them `_write` returns it.
        with on_failure(lambda: self._transfers.buffers.put(buffer)):
            # numpy releases the interpreter's lock while it copies.
            numpy.copyto(_part(buffer, offset, len(run)), run)
            self._pending.append(self._transfers.threads.submit(self._write, offset, len(run), buffer))

    def _write(self, offset: int, count: int, buffer: torch.Tensor) -> None:
        try:
            run = _part(buffer, offset, count).data
            # The checksum is of the bytes in memory, so that reading finds what the disk has damaged.
            checksum = None if self._written is None else zlib.crc32(run)
            first, stop = -(-offset // PAGE_BYTES) * PAGE_BYTES, (offset + count) // PAGE_BYTES * PAGE_BYTES
            if first >= stop or not self._write_pages(first, run[first - offset : stop - offset]):
                first = stop = offset
            write_all(self._file, offset, run[: first - offset])
            write_all(self._file, stop, run[stop - offset :])
            if self._written is not None and checksum is not None:
                self._written(offset, count, checksum)
        finally:
            self._transfers.buffers.put(buffer)

    def _write_pages(self, offset: int, pages: memoryview) -> bool:
        """Write whole pages past the page cache; return False if the file system cannot."""
        if not hasattr(os, "O_DIRECT"):
            return False
        try:
            direct = os.open(self._path, os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            write_all(direct, offset, pages)
        except OSError as error:
            # Some file systems accept the flag and then refuse the alignment.
            if error.errno != errno.EINVAL:
                raise
            return False
        finally:
            os.close(direct)
        return True

    def drain(self) -> None:
        """Block until all runs are written.

        Raises:
            OSError: if a write has failed.
        """
        while self._pending:
            self._pending.popleft().result()

    def abandon(self) -> None:
        """Block until no thread uses the file, whether the writes succeed or fail."""
        while self._pending:
            with contextlib.suppress(OSError):
                self._pending.popleft().result()


def _part(
    buffer: torch.Tensor, offset: int, count: int
) -> numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]]:
    """Return the part of a page-aligned buffer for a run of a file, with the run's offset in its page.

    Equal offsets let whole pages be written past the page cache, directly from the buffer.
    """
    before = offset % PAGE_BYTES
    part: numpy.ndarray[tuple[int], numpy.dtype[numpy.uint8]] = buffer[before : before + count].numpy()
    return part


def write_all(file: int, offset: int, data: memoryview) -> None:
    """Write all bytes at `offset`."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)


def read_pages(path: str, offset: int, pages: torch.Tensor, needed: int) -> bool:
    """Read whole pages past the page cache; return False if the file system cannot, or the file ends early.

    Args:
        path: the file.
        offset: offset of the first page in the file.
        pages: page-aligned memory for the pages.
        needed: the number of bytes that the file must have; behind them it may end.
    """
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    view, done = pages.numpy().data, 0
    try:
        while done < needed and done % PAGE_BYTES == 0:
            count = os.preadv(direct, [view[done:]], offset + done)
            done += count
            if count == 0:
                break
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(direct)
    return done >= needed


def read_ahead(reads: Iterable[Read]) -> Iterator[torch.Tensor]:
    """Yield the bytes of reads in their order, while threads carry out the next ones.

    Args:
        reads: requested a few ahead of the caller.

    Yields:
        The bytes of a read, uint8, valid until the next one is requested. An error of a read is raised here.
    """
    transfers = shared_transfers()
    waiting: deque[tuple[torch.Tensor, int, Future[torch.Tensor]]] = deque()
    source = iter(reads)
    following = next(source, None)
    try:
        while following is not None or waiting:
            while following is not None and _has_room(waiting, following[0]):
                count, fill = following
                buffer = transfers.take(count)
                waiting.append((buffer, count, transfers.threads.submit(fill, buffer)))
                following = next(source, None)
            buffer, _, reading = waiting.popleft()
            yield reading.result()
            transfers.give_back(buffer)
    finally:  # the caller failed or stopped early
        for _, _, reading in waiting:
            reading.cancel()


def _has_room(waiting: deque[tuple[torch.Tensor, int, Future[torch.Tensor]]], count: int) -> bool:
    """True if `count` more bytes may be read ahead."""
    bytes_ahead = sum(ahead for _, ahead, _ in waiting)
    return not waiting or (len(waiting) < _READS_AHEAD and bytes_ahead + count <= _AHEAD_BYTES)
