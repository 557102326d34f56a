"""Copies of a run's artifacts on the client's machine: whole files, checksummed, atomically replaced."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from headwater.appliance.remote.artifacts import BLOCK, Artifact
from headwater.appliance.remote.connection import Connection
from headwater.appliance.remote.copy_lock import CopyLock
from headwater.core.errors import QueueError
from headwater.core.files import PARTIAL_SUFFIX, disk_errors, make_folder, sync_folder
from headwater.store.checkpoint_folder import publish

_SEAL = "manifest.json"
"""A folder with this file is complete when it appears, as a checkpoint is. Its copy appears complete too."""


class Mirror:
    """Copies the artifacts of one job to a folder.

    A file is written under a name that ends with `.partial`, and renamed when it is whole. Files that an
    earlier process has left there are compared block by block, and only blocks that differ are sent. Files
    that the appliance deletes stay. Two processes never copy to a folder at the same time: they would write
    the same partial files.

    Args:
        connection: to the appliance.
        job: name of the job.
        folder: the folder on this machine.
        wanted: true for the paths of the artifacts to copy.
        say: prints a notice if another process copies to the folder.

    Attributes:
        is_waiting: true if the last call of `copy_changes` copied nothing because of another process.
        is_whole: true if the last call of `copy_changes` copied everything.
    """

    def __init__(
        self,
        connection: Connection,
        job: str,
        folder: Path,
        wanted: Callable[[str], bool] = lambda path: True,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._connection = connection
        self._job = job
        self._folder = folder
        self._wanted = wanted
        self._say = say
        self._lock = CopyLock(folder)
        self.is_waiting = False
        self._listed: tuple[str, list[Artifact]] | None = None
        self._copied: dict[str, Artifact] = {}
        self.is_whole = False

    def copy_changes(self) -> Iterator[None]:
        """Copy what has changed since the last call. Yield after each block, so that the caller can pause.

        At the end `is_whole` tells if all artifacts are there as they were listed. Otherwise some changed
        while they were copied, and the next call copies them again; or `is_waiting` is true.

        Raises:
            StoreError: if a file cannot be written.
        """
        was_waiting, self.is_waiting = self.is_waiting, not self._lock.take()
        if self.is_waiting:
            self.is_whole = False
            if not was_waiting:
                self._say(f"another process copies artifacts to {self._folder}; waiting for its end")
            return
        wanted = [each for each in self._list() if self._wanted(each.path)]
        sealed = sealed_folders(wanted)
        is_whole = True
        for each in wanted:
            if _seal_of(each, sealed) is None:
                is_whole &= yield from self._copy(each, each.path)
        for folder in sealed:
            is_whole &= yield from self._copy_sealed(
                folder, [each for each in wanted if _seal_of(each, sealed) == folder]
            )
        self.is_whole = is_whole

    def close(self) -> None:
        """Release the folder, so that another process can copy to it."""
        self._lock.release()

    def _list(self) -> list[Artifact]:
        known = self._listed and self._listed[0]
        answer = self._connection.ask("list", name=self._job, known=known).header["answer"]
        if answer["artifacts"] is not None:
            listed = [Artifact.from_record(record) for record in answer["artifacts"]]
            self._listed = (answer["digest"], listed)
        assert self._listed is not None, "the first list is sent"
        return self._listed[1]

    def _copy_sealed(self, folder: str, artifacts: Sequence[Artifact]) -> Generator[None, None, bool]:
        if all(self._has(each, each.path) for each in artifacts):
            return True
        partial = f"{folder}{PARTIAL_SUFFIX}"
        for each in artifacts:
            target = f"{partial}{each.path.removeprefix(folder)}"
            if not (yield from self._copy(each, target)):
                return False
        publish(self._folder / partial, self._folder / folder)
        self._copied.update({each.path: each for each in artifacts})
        return True

    def _has(self, artifact: Artifact, path: str) -> bool:
        """True if this version of the artifact was copied to a path, by this process or an earlier one."""
        try:
            found = (self._folder / path).stat()
        except OSError:
            return False
        if found.st_size != artifact.size:
            return False
        # `_copied` is also compared, because a file system may round times.
        return self._copied.get(path) == artifact or found.st_mtime_ns == artifact.modified_ns

    def _copy(self, artifact: Artifact, path: str) -> Generator[None, None, bool]:
        """Copy an artifact to a path in the folder; return true if it is there now."""
        if self._has(artifact, path):
            return True
        target = self._folder / path
        partial = target.with_name(target.name + PARTIAL_SUFFIX)
        with disk_errors(target):
            make_folder(target.parent)
            with os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b") as file:
                for position in range(0, artifact.size, BLOCK):
                    size = min(BLOCK, artifact.size - position)
                    mine = _block(file, position, size) or _block_of(target, position, size)
                    data = self._read(artifact, position, mine)
                    if data is None:
                        return False
                    file.seek(position)
                    file.write(data)
                    yield
                file.truncate(artifact.size)
                file.flush()
                os.fsync(file.fileno())
            os.utime(partial, ns=(artifact.modified_ns, artifact.modified_ns))
            partial.replace(target)
            sync_folder(target.parent)
        self._copied[path] = artifact
        return True

    def _read(self, artifact: Artifact, position: int, mine: bytes | None) -> bytes | None:
        """Return a block of an artifact, or `None` if the artifact has changed.

        Args:
            artifact: the artifact.
            position: place of the first byte.
            mine: bytes that may be equal; they are then not sent.
        """
        reply = self._connection.ask(
            "read",
            name=self._job,
            artifact=artifact.to_record(),
            position=position,
            known=None if mine is None else hashlib.sha256(mine).hexdigest(),
        )
        state = reply.header["answer"]
        if state != "data":
            return mine if state == "same" else None
        size = min(BLOCK, artifact.size - position)
        if len(reply.body) != size or hashlib.sha256(reply.body).hexdigest() != reply.header["digest"]:
            raise QueueError(
                f"a block of {artifact.path} does not have its checksum",
                where=str(self._connection.address),
                remedy="run the command again; it continues where it stopped",
            )
        return reply.body


def sealed_folders(artifacts: Sequence[Artifact]) -> list[str]:
    """Return the folders with a `manifest.json`, such as checkpoints, without those inside of others."""
    folders = sorted(each.path.rpartition("/")[0] for each in artifacts if each.path.endswith(f"/{_SEAL}"))
    found: list[str] = []
    for folder in folders:
        if not any(folder.startswith(f"{other}/") for other in found):
            found.append(folder)
    return found


def _seal_of(artifact: Artifact, sealed: Sequence[str]) -> str | None:
    return next((folder for folder in sealed if artifact.path.startswith(f"{folder}/")), None)


def _block(file: BinaryIO, position: int, size: int) -> bytes | None:
    file.seek(position)
    data = file.read(size)
    return data if len(data) == size else None


def _block_of(path: Path, position: int, size: int) -> bytes | None:
    try:
        with path.open("rb") as file:
            return _block(file, position, size)
    except OSError:
        return None
