"""Cache of open HDF5 files, for data sets of more files than a process may keep open."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from pathlib import Path
from typing import final

import h5py

from headwater.data.checksums import CheckedSamples

MAX_OPEN_FILES = 16


def open_for_reading(path: Path) -> h5py.File:
    """Open an HDF5 file for reading."""
    return h5py.File(path, "r")


@final
class OpenFiles:
    """Cache of open HDF5 files that closes the least recently used one first.

    HDF5 files survive neither pickling nor a fork. A pickled copy is therefore empty, and a forked process
    starts with an empty cache.

    Args:
        opened: opens a file; a function of a module, so that it can be pickled.
    """

    def __init__(self, opened: Callable[[Path], h5py.File] = open_for_reading) -> None:
        self._opened = opened
        self._start()

    def __getitem__(self, path: Path) -> CheckedSamples:
        if self._process != os.getpid():
            self._start()
        if path not in self._files:
            file = self._opened(path)
            self._files[path] = file, CheckedSamples(file, path)
            if len(self._files) > MAX_OPEN_FILES:
                self._files.popitem(last=False)[1][0].close()
        self._files.move_to_end(path)
        return self._files[path][1]

    def _start(self) -> None:
        self._files: collections.OrderedDict[Path, tuple[h5py.File, CheckedSamples]]
        self._files = collections.OrderedDict()
        self._process = os.getpid()

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[Callable[[Path], h5py.File]]]:
        return (OpenFiles, (self._opened,))
