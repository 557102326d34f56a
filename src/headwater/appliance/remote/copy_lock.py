"""The lock of a folder to which the artifacts of a job are copied."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import final

from headwater.core.files import disk_errors, make_folder

LOCK_FILE = "appliance.lock"
"""Name of the locked file in the folder. It stays there: another process may wait for it."""


@final
class CopyLock:
    """The right to copy artifacts to a folder. One process has it at a time, and loses it when it ends.

    Args:
        folder: the folder; created when the lock is taken.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_FILE
        self._fd: int | None = None

    def take(self) -> bool:
        """Try to take the lock, which this object then holds until `release`. Return true if it holds it.

        Raises:
            StoreError: if the file of the lock cannot be written.
        """
        if self._fd is not None:
            return True
        with disk_errors(self._path):
            make_folder(self._path.parent)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._fd = descriptor
            except BlockingIOError:
                return False
            finally:
                if self._fd is None:
                    os.close(descriptor)
        return True

    def release(self) -> None:
        """Release the lock if this object holds it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
