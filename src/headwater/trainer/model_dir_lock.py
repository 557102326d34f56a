"""The lock of a run's folder."""

from __future__ import annotations

import datetime
import fcntl
import os
import socket
from pathlib import Path
from typing import Self

from headwater.core.cleanup import on_failure
from headwater.core.errors import ModelDirBusyError
from headwater.core.files import check_place, disk_errors, make_folder
from headwater.store.checkpoint_folder import recover

_LOCK_FILE = "run.lock"


class ModelDirLock:
    """A lock that keeps other runs out of a model_dir. The system releases it when the process ends.

    Entering it deletes incomplete files that a killed run left.

    Args:
        model_dir: the folder; created if missing.

    Raises:
        ModelDirBusyError: on entering, if another run holds the lock. The message names its process.
        RunError: on entering, if the folder or its lock cannot be written.
    """

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._path = model_dir / _LOCK_FILE
        self._fd = -1

    def __enter__(self) -> Self:
        check_place(self._model_dir, expected="a folder")
        check_place(self._path, expected="a file")
        with disk_errors(self._path):
            make_folder(self._model_dir)
            # The file is not truncated, because it names the run that holds the lock.
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        # This is also needed if the disk is full: otherwise this process would hold the lock until it ends.
        with on_failure(lambda: os.close(self._fd)):
            self._take()
            recover(self._model_dir)
        return self

    def _take(self) -> None:
        """Lock the file, and write the name of this process into it."""
        with disk_errors(self._path):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.read(self._fd, 1000).decode(errors="replace")
                raise ModelDirBusyError(
                    f"another run works in this model_dir: {holder or 'it has just begun'}",
                    where=str(self._model_dir),
                    remedy="wait for it, stop it, or name another model_dir",
                ) from error
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, _this_process().encode(), 0)

    def __exit__(self, *exception: object) -> None:
        # The file is not removed: a run that has already opened it would then lock a file without a name.
        os.close(self._fd)


def _this_process() -> str:
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return f"process {os.getpid()} on {socket.gethostname()}, since {now}"
