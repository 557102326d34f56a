"""Tensors whose memory is in files without names, so that the system can remove their pages from RAM."""

from __future__ import annotations

import logging
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import final

import torch

from headwater.core.errors import StoreError
from headwater.core.files import disk_errors
from headwater.core.mapped_memory import map_file, reserve
from headwater.core.scratch import open_unnamed
from headwater.core.warn_once import warn_once

logger = logging.getLogger(__name__)

LARGE_BYTES = 1 << 20
"""Smaller tensors stay in memory. Files would save little, and a process may have only so many mappings."""
_TOUCHED_BYTES = 128 << 20
"""Bytes that may be written to tensors in files before their pages are removed from memory."""


def _put_in_file(memory: mmap.mmap, folder: Path) -> None:
    """Put reserved memory into a new file without a name. Its content is zeros then.

    Raises:
        DiskFullError: if the file does not fit. The memory is unchanged.
        StoreError: for other errors of the disk.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = open_unnamed(folder)
        try:
            # Not `truncate`: if the disk fills up, a write to a page without a block kills the process.
            os.posix_fallocate(file, 0, len(memory))
            map_file(memory, file)
        finally:
            os.close(file)


@final
class FilePages:
    """The pages of all tensors in files."""

    def __init__(self) -> None:
        self._mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._touched = 0

    def allocate(self, folder: Path, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor whose memory is in a file without a name. The file ends with the tensor.

        Args:
            folder: folder of the file; created if missing.
            shape: the shape; at least one element.
            dtype: the dtype.

        Raises:
            DiskFullError: if the file does not fit.
            StoreError: for other errors of the disk.
        """
        pages = reserve(math.prod(shape) * dtype.itemsize)
        _put_in_file(pages, folder)
        self._mappings.add(pages)
        return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))  # the tensor keeps the mapping

    def count_written(self, num_bytes: int) -> None:
        """Count bytes that may have been written to tensors in files. Above a limit, `release` the pages."""
        self._touched += num_bytes
        if self._touched >= _TOUCHED_BYTES:
            self.release()

    def release(self) -> None:
        """Remove all pages from the memory of this process. The next use of a tensor reads them again."""
        for pages in list(self._mappings):
            pages.madvise(mmap.MADV_DONTNEED)  # the mappings are shared: the files keep the data
        self._touched = 0


FILE_PAGES = FilePages()

_folder_of_copies: ContextVar[Path | None] = ContextVar("folder_of_copies", default=None)


@contextmanager
def copies_in_files(folder: Path) -> Iterator[None]:
    """Enter a context in which `put_copy_in_file` uses this folder.

    Args:
        folder: folder of the files. They have no names, and end with the copies.
    """
    token = _folder_of_copies.set(folder)
    try:
        yield
    finally:
        _folder_of_copies.reset(token)


def put_copy_in_file(folder: Path | None, memory: mmap.mmap) -> bool:
    """Put reserved memory for a copy of stored values into a file without a name, if the copy is large.

    Args:
        folder: folder of the file outside of `copies_in_files`; `None`: such copies stay in memory.
        memory: the memory. Its content is zeros then.

    Returns:
        False if the copy stays in memory; also if the disk is full or has an error.
    """
    folder = _folder_of_copies.get() or folder
    if folder is None or len(memory) < LARGE_BYTES:
        return False
    try:
        _put_in_file(memory, folder)
    except StoreError as error:  # a run whose disk fails can still write a checkpoint to another disk
        warn_once(logger, "copies of tensors stay in memory, because a file cannot be made: %s", error.what)
        return False
    return True
