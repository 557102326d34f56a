"""Durable files. Each chunk is written with a checksum, which is compared when the chunk is read."""

from __future__ import annotations

import errno
import os
import stat
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from headwater.core.errors import CheckpointError, CorruptError, DiskFullError, RunError, StoreError

CHUNK_BYTES = 4 << 20
"""Largest chunk with a checksum. Reading verifies whole chunks, so they are small."""

Chunk = tuple[int, int, int]
"""A chunk: offset in the file, length in bytes, CRC-32."""

PARTIAL_SUFFIX = ".partial"
"""Suffix of a file or folder that is still being written, or that is being deleted."""

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}
_WRONG_KIND = {errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ELOOP}
_OTHER_COPY = "use another checkpoint, or another copy of this one"
_MAKE_WAY = "move it away, or name another folder"
_MAKE_WRITABLE = "give this user the right to write there, or name another folder"
_OTHER_DISK = "check the disk and how it is mounted, or name a folder on another disk"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Enter a context in which an `OSError` becomes an error of this project that names `path` and a remedy.

    Args:
        path: what is read or written; the place in the message unless the system names another file.

    Raises:
        DiskFullError: if there is no room.
        StoreError: for any other error of the system.
    """
    try:
        yield
    except OSError as error:
        raise _explained(error, path) from error


def _explained(error: OSError, path: Path) -> StoreError:
    if error.errno in _NO_SPACE:
        return DiskFullError(
            f"no space left for {path.name}",
            where=str(path),
            remedy="free space there or name a folder on a larger disk; the last checkpoint is intact",
        )
    found = Path(error.filename) if isinstance(error.filename, str) else path
    why = error.strerror or str(error)
    if error.errno in _NOT_ALLOWED:
        return StoreError(f"{path.name}: {why}", where=str(found), remedy=_MAKE_WRITABLE)
    obstacle = _obstacle(found) if error.errno in _WRONG_KIND else None
    if obstacle is None:
        return StoreError(f"{path.name}: {why}", where=str(found), remedy=_OTHER_DISK)
    place, kind = obstacle
    return StoreError(f"{path.name}: {why}; found {kind}", where=str(place), remedy=_MAKE_WAY)


def _obstacle(path: Path) -> tuple[Path, str] | None:
    """Return `path` if it exists, or the file or dangling link on the way to it, with its kind; or `None`."""
    for place in (path, *path.parents):
        kind = kind_of(place)
        if kind is not None:
            return None if place != path and kind == "a folder" else (place, kind)
    return None


def kind_of(path: Path) -> str | None:
    """Return in words what is at `path` (a file, a folder, …), or `None` if nothing is there."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return None
    if stat.S_ISLNK(mode):
        target = kind_of(path.resolve())
        return f"a link to {path.readlink()}, which does not exist" if target is None else target
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a special file")


def check_place(path: Path, *, expected: str) -> None:
    """Raise if a file or folder cannot be written at `path`. Called before work that would be lost.

    Args:
        path: what will be opened, or created with its missing parents.
        expected: `a file` or `a folder`.

    Raises:
        RunError: if something else lies there, or this user may not write it.
    """
    found = kind_of(path)
    if found not in (None, expected):
        raise RunError(f"expected {expected} or nothing, found {found}", where=str(path), remedy=_MAKE_WAY)
    place = path if found else next((each for each in path.parents if kind_of(each)), path)
    kind = kind_of(place)
    if found is None and kind != "a folder":
        raise RunError(f"expected a folder, found {kind}", where=str(place), remedy=_MAKE_WAY)
    needed = os.W_OK | (os.X_OK if kind == "a folder" else 0)
    if not os.access(place, needed, effective_ids=True):
        raise RunError(
            f"expected {kind} that this user (uid {os.geteuid()}) can write, found a read-only one",
            where=str(place),
            remedy=_MAKE_WRITABLE,
        )


def check_replaceable(path: Path) -> None:
    """Raise if `path` is a folder, which `replace_file` cannot replace. A link is replaced.

    Raises:
        RunError: if a folder lies there.
    """
    if path.is_dir() and not path.is_symlink():
        raise RunError("expected a file or nothing, found a folder", where=str(path), remedy=_MAKE_WAY)


def sync_folder(folder: Path) -> None:
    """Write the entries of a folder to the disk, so that they survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents; their names survive a loss of power."""
    # Listed before they exist: each of their names must be synced in its parent.
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file atomically: after a crash, `path` has either the old content or the new one.

    Raises:
        DiskFullError: if there is too little space; the old content stays.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with disk_errors(path):
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                # Before the rename: else a loss of power could leave an empty file under the name.
                os.fsync(file.fileno())
            # Atomic, also over an existing file.
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise
        # The new name itself must survive a loss of power.
        sync_folder(path.parent)


class CheckedFile:
    """Writes a file of known size, in any order, inside a context. At its end the file is on disk.

    Args:
        path: where it is created; an existing file is replaced.
        num_bytes: its size; the space is reserved at once.

    Raises:
        DiskFullError: if there is too little space.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self._chunks: list[Chunk] = []
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
        """Offset, length and checksum of each chunk that was written, in file order."""
        return sorted(self._chunks)

    def __enter__(self) -> Self:
        with disk_errors(self.path):
            self._fd = os.open(self.path, os.O_RDWR)
        return self

    def put(self, offset: int, data: memoryview) -> None:
        """Write bytes at `offset`. Each byte of the file is written once."""
        with disk_errors(self.path):
            for first in range(0, len(data), CHUNK_BYTES):
                chunk = data[first : first + CHUNK_BYTES]
                done = 0
                while done < len(chunk):
                    done += os.pwrite(self._fd, chunk[done:], offset + first + done)
                # The checksum is of the bytes in memory, so that reading finds what the disk has damaged.
                self._chunks.append((offset + first, len(chunk), zlib.crc32(chunk)))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with disk_errors(self.path):
            try:
                if kind is None:
                    os.fsync(self._fd)
            finally:
                os.close(self._fd)


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
            raise CheckpointError("the file is missing", where=str(path), remedy=_OTHER_COPY)
        self.path = path
        self._held: int | None = None
        if hold:
            with disk_errors(path):
                self._held = os.open(path, os.O_RDONLY)
            # Closed with the last tensor that reads it; no caller knows when that is.
            weakref.finalize(self, os.close, self._held)
        self.num_bytes = (path.stat() if self._held is None else os.fstat(self._held)).st_size
        self._chunks: Sequence[Chunk] | None = None
        self._last: tuple[int, bytes] | None = None  # a chunk that was read in part: its rest may be next
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
                f"the file is {kind}: {self.num_bytes} bytes of {written}",
                where=str(path),
                remedy=_OTHER_COPY,
            )

    def read(self, low: int, count: int, what: str) -> bytes:
        """Return `count` bytes from offset `low` on.

        Args:
            low: offset in the file.
            count: number of bytes.
            what: name of the bytes, for errors.

        Raises:
            CorruptError: if the bytes are not those that were written.
        """
        if self._chunks is None:
            return self._read(low, count, what)
        high, parts = low + count, []
        index = bisect_right(self._chunks, low, key=lambda chunk: chunk[0]) - 1
        while index < len(self._chunks) and self._chunks[index][0] < high:
            offset, length, _ = self._chunks[index]
            chunk = self._chunk(index, what)
            parts.append(chunk[max(low - offset, 0) : high - offset])
            # A run of elements seldom ends at a chunk: the next run begins in the same one.
            self._last = (index, chunk) if high < offset + length else None
            index += 1
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _chunk(self, index: int, what: str) -> bytes:
        assert self._chunks is not None, "only a file with checksums has chunks"
        if self._last is not None and self._last[0] == index:
            return self._last[1]
        offset, length, checksum = self._chunks[index]
        data = self._read(offset, length, what)
        if zlib.crc32(data) != checksum:
            raise CorruptError(
                f"{what}: bytes {offset} to {offset + length} of the file are not what was written",
                where=str(self.path),
                remedy=_OTHER_COPY,
            )
        return data

    def _read(self, low: int, count: int, what: str) -> bytes:
        with disk_errors(self.path), self._opened() as file:
            data = _read_at(file, low, count)
        if len(data) < count:
            raise CorruptError(f"{what}: the file is truncated", where=str(self.path), remedy=_OTHER_COPY)
        return data

    @contextmanager
    def _opened(self) -> Iterator[int]:
        if self._held is not None:
            yield self._held
            return
        with self.path.open("rb") as file:
            yield file.fileno()


def _read_at(file: int, low: int, count: int) -> bytes:
    """Return `count` bytes from offset `low` on, or all up to the end. One `pread` reads 2 GiB at most."""
    parts = [os.pread(file, count, low)]
    while parts[-1] and (done := sum(map(len, parts))) < count:
        parts.append(os.pread(file, count - done, low + done))
    return parts[0] if len(parts) == 1 else b"".join(parts)
