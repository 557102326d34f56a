"""Files read and written in large aligned blocks, past the page cache where the file system allows it."""

from __future__ import annotations

import contextlib
import os
import weakref
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headwater.core.buffers import PAGE_BYTES, aligned_empty
from headwater.core.errors import CorruptError
from headwater.core.files import disk_errors
from headwater.core.open_file_limit import allow_open_files
from headwater.core.recorder import DISK_READ, DISK_WRITE, RECORDER
from headwater.core.scratch import open_unnamed
from headwater.core.transfers import write_all


class Checksums:
    """The CRC-32 of every block of a file. A block that is read is compared with what was written.

    Args:
        path: the file, for errors.
        contents: what it holds, for errors.
        memory: for the checksums, zero at first: 8 bytes for each page of the file. Only the entries of the
            first pages of blocks are used. Processes that share the file share this memory.
    """

    def __init__(self, path: Path, contents: str, memory: torch.Tensor) -> None:
        self._path = path
        self._contents = contents
        self._values = memory.view(torch.int64).numpy()

    def note(self, offset: int, block: memoryview) -> None:
        """Store the checksum of a block that has been written."""
        self._values[offset // PAGE_BYTES] = zlib.crc32(block) + 1

    def check(self, offset: int, block: memoryview) -> None:
        """Compare a block that was read with its stored checksum. Do nothing if the block was never written.

        Raises:
            CorruptError: if it differs from what was written.
        """
        written = self._values[offset // PAGE_BYTES]
        if written and zlib.crc32(block) + 1 != written:
            end = offset + len(block)
            raise CorruptError(
                f"bytes {offset} to {end} of the file of {self._contents} differ from what was written",
                where=str(self._path),
                remedy="the disk or memory may be faulty; resume from the last checkpoint on another disk",
            )


class BlockFile:
    """A scratch file of fixed size. Offsets, lengths and buffers are multiples of the page size.

    The file has no name. So two runs cannot use the same file, no other process can replace it, and it does
    not stay behind, even if the process is killed. See [Note: shared scratch folders].

    Attributes:
        origin: the path at which another process of this user opens it, while this process has it open.

    Args:
        path: its name in errors. The file is created in the folder of this path.
        num_bytes: its size. The space is reserved at once, so that a full disk is an error now.
        direct: bypass the page cache (O_DIRECT); ignored where the file system refuses it.
        checksums: compare what is read with what was written.
        origin: the `origin` of a file that another process has created. That file is opened instead.
        stage: name of the stage to which its contents belong, for the recorder.

    Raises:
        DiskFullError: if there is no room.
    """

    def __init__(
        self,
        path: Path,
        num_bytes: int,
        *,
        direct: bool = True,
        checksums: Checksums | None = None,
        origin: Path | None = None,
        stage: str = "",
    ) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self._checksums = checksums
        self._stage = stage
        with disk_errors(path):
            if origin is None:
                self._fd = open_unnamed(path.parent, direct=direct)
            else:
                self._fd = _open(origin, direct)
            self.origin = Path(f"/proc/{os.getpid()}/fd/{self._fd}")
            try:
                if num_bytes and origin is None:
                    os.posix_fallocate(self._fd, 0, num_bytes)
            except OSError:
                os.close(self._fd)
                raise
        # If its model is dropped, no `close` is called. The system frees the space of a file that is closed.
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False  # threads may still use it, and the end of the process closes it

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill `into` (uint8) from `offset`.

        Raises:
            CorruptError: if the file ends early, or these are not the bytes that were written.
        """
        view, done = _bytes_of(into), 0
        with RECORDER.span(DISK_READ, self._stage, len(view)), disk_errors(self.path):
            while done < len(view):
                count = os.preadv(self._fd, [view[done:]], offset + done)
                # A read past the page cache can be continued only at a page boundary.
                if count == 0 or count % PAGE_BYTES:
                    raise CorruptError(
                        f"expected {len(view)} bytes at offset {offset}, but could read only {done + count}",
                        where=str(self.path),
                        remedy="the file was cut or the disk fails; resume from the last checkpoint",
                    )
                done += count
        if self._checksums is not None:
            self._checksums.check(offset, view)

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Write `data` (uint8) at `offset`."""
        view = _bytes_of(data)
        with RECORDER.span(DISK_WRITE, self._stage, len(view)), disk_errors(self.path):
            write_all(self._fd, offset, view)
        if self._checksums is not None:
            self._checksums.note(offset, view)

    def leave_cache(self) -> None:
        """Write all data to the disk, and remove it from the page cache."""
        with RECORDER.span(DISK_WRITE, self._stage), disk_errors(self.path):
            # Pages that are not written yet would stay in the cache.
            os.fdatasync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._close()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)


def open_files(
    sizes: Mapping[Path, int],
    *,
    direct: bool = True,
    contents: Sequence[str] | None = None,
    checksums: Sequence[torch.Tensor] | None = None,
    origins: Sequence[Path] | None = None,
    stages: Sequence[str] | None = None,
) -> list[BlockFile]:
    """Open a file for each path. If one cannot be opened, close those that are open, and raise.

    Args:
        sizes: bytes of each file.
        direct: bypass the page cache.
        contents: what each file holds, for errors. If given, data that is read is compared with checksums.
        checksums: memory for checksums, shared by the processes that share the files; see `checksum_bytes`.
        origins: the `origin` of each file, if another process has created the files.
        stages: name of the stage of each file, for the recorder.

    Raises:
        DiskFullError: if there is no room for all of them.
    """
    allow_open_files(len(sizes))
    with contextlib.ExitStack() as opened:
        files = []
        for index, (path, num_bytes) in enumerate(sizes.items()):
            own = None
            if contents is not None:
                memory = aligned_empty(checksum_bytes(num_bytes)) if checksums is None else checksums[index]
                own = Checksums(path, contents[index], memory)
            origin = None if origins is None else origins[index]
            stage = "" if stages is None else stages[index]
            files.append(BlockFile(path, num_bytes, direct=direct, checksums=own, origin=origin, stage=stage))
            opened.callback(files[-1].close)
        # All files are open now, and the caller closes them.
        opened.pop_all()
    return files


def checksum_bytes(num_bytes: int) -> int:
    """Return how many bytes the checksums of a file of `num_bytes` take."""
    return 8 * -(-num_bytes // PAGE_BYTES)


def _open(origin: Path, direct: bool) -> int:
    """Open another process's file, and return its descriptor."""
    if direct and hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            return os.open(origin, os.O_RDWR | os.O_DIRECT)
    return os.open(origin, os.O_RDWR)
