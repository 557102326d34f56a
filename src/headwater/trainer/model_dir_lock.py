"""The lock of a run's folder."""

from __future__ import annotations

import datetime
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Self

from headwater.core.cleanup import on_failure
from headwater.core.errors import ModelDirBusyError
from headwater.core.files import check_place, disk_errors, is_at, make_folder
from headwater.store.checkpoint_folder import recover

_LOCK_FILE = "run.lock"


class ModelDirLock:
    """A lock that keeps other runs out of a model_dir. The system releases it when the process ends.

    Entering it deletes incomplete files that a killed run left. If an error ends the context, a folder that
    entering it has made is removed, unless something else was written there.

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
        self._has_made_folder = False

    def __enter__(self) -> Self:
        check_place(self._model_dir, expected="a folder")
        check_place(self._path, expected="a file")
        while not self._enter():
            pass
        return self

    def _enter(self) -> bool:
        """Make the folder and take its lock. Return false if another run has removed the folder meanwhile."""
        with disk_errors(self._path):
            self._has_made_folder = not self._model_dir.exists()
            make_folder(self._model_dir)
            # The file is not truncated, because it names the run that holds the lock.
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        # This is also needed if the disk is full: otherwise this process would hold the lock until it ends.
        with on_failure(lambda: os.close(self._fd)):
            self._take()
            is_ours = is_at(self._fd, self._path)
            if is_ours:
                recover(self._model_dir)
        if not is_ours:
            os.close(self._fd)
        return is_ours

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

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and self._has_made_folder:
            self._remove_empty_folder()
        os.close(self._fd)

    def _remove_empty_folder(self) -> None:
        """Remove the folder if it has only the lock. Called while the lock is held."""
        with suppress(OSError):  # another process may write there; the error of the run is raised
            if list(self._model_dir.iterdir()) == [self._path]:
                self._path.unlink()
                self._model_dir.rmdir()


def _this_process() -> str:
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return f"process {os.getpid()} on {socket.gethostname()}, since {now}"
