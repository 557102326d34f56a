"""The files that a client sends with a job: the user's code, params and small data."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from headwater.appliance.remote.connection import Connection
from headwater.appliance.remote.workspace import MAX_FILES
from headwater.core.errors import ConfigError
from headwater.core.files import disk_errors

MAX_BYTES = 256 << 20
"""Most bytes of one submission."""
_BLOCK, _ASKED = 4 << 20, 5000
_SKIPPED = frozenset({"__pycache__", ".git", ".hg", ".svn", ".venv", "node_modules"})


@dataclasses.dataclass(frozen=True)
class BundledFile:
    """A file to send.

    Attributes:
        source: its path on this machine.
        path: its path in the working folder of the job, with `/`.
        size: bytes.
    """

    source: Path
    path: str
    size: int


class Bundle:
    """The files of one submission, within a limit.

    Args:
        max_bytes: largest number of bytes of all files together.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._files: dict[str, BundledFile] = {}
        self._max_bytes = max_bytes
        self._bytes = 0

    @property
    def files(self) -> list[BundledFile]:
        """The files, in the order in which they were added."""
        return list(self._files.values())

    def add(self, source: Path, path: str, wanted: Callable[[Path], bool] = lambda path: True) -> None:
        """Add a file, or the files of a folder and its subfolders. Links are followed, except to folders.

        Args:
            source: the file or folder.
            path: its path in the working folder of the job.
            wanted: true for the files of a folder to add.

        Raises:
            ConfigError: if the files are too many or too large together.
            StoreError: if a file cannot be read.
        """
        if source.is_dir():
            for file in filter(wanted, _files_of(source)):
                self._add_file(file, f"{path}/{file.relative_to(source).as_posix()}", source)
        else:
            self._add_file(source, path, source)

    def _add_file(self, source: Path, path: str, named: Path) -> None:
        with disk_errors(source):
            size = source.stat().st_size
        path = PurePosixPath(path).as_posix()
        if path in self._files:
            return
        self._files[path] = BundledFile(source, path, size)
        self._bytes += size
        if self._bytes > self._max_bytes or len(self._files) > MAX_FILES:
            raise ConfigError(
                f"expected at most {self._max_bytes >> 20} MiB and {MAX_FILES} files to send, found more",
                where=str(named),
                remedy="copy large data to the appliance (rsync -a), and write its absolute path there; "
                "or list a folder that both machines mount at the same path in mount_dirs",
            )


def _files_of(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        # The list itself is changed, so that `os.walk` does not enter the other folders.
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        yield from (path for name in sorted(names) if (path := Path(place, name)).is_file())


def send(connection: Connection, bundle: Bundle, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Send the contents that the appliance does not have, and return the list of files for the submission.

    Args:
        connection: to the appliance.
        bundle: the files.
        say: prints a notice before files are sent.

    Raises:
        StoreError: if a file cannot be read.
        QueueError: if a file changes while it is sent, or the connection cannot be made.
    """
    files = []
    sources: dict[str, BundledFile] = {}
    for each in bundle.files:
        with disk_errors(each.source), each.source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        sources[digest] = each
        is_executable = os.access(each.source, os.X_OK)
        files.append({"path": each.path, "digest": digest, "executable": is_executable})
    digests, missing = list(sources), {}
    for first in range(0, len(digests), _ASKED):
        found = connection.ask("find", digests=digests[first : first + _ASKED]).header["answer"]
        missing.update({digest: position for digest, position in found.items() if position is not None})
    if missing:
        size = sum(sources[digest].size for digest in missing)
        say(f"sending {len(missing)} of {len(files)} files, {size / 2**20:.1f} MiB")
    for digest, position in missing.items():
        _send_file(connection, sources[digest], digest, position)
    return files


def _send_file(connection: Connection, file: BundledFile, digest: str, position: int | None) -> None:
    with disk_errors(file.source), file.source.open("rb") as source:
        while position is not None:
            source.seek(position)
            # If the file has grown meanwhile, only the first `size` bytes are sent. The server compares their
            # checksum with the digest.
            data = source.read(min(_BLOCK, file.size - position))
            reply = connection.ask("add", data, digest=digest, size=file.size, position=position)
            before, position = position, reply.header["answer"]
            if position == before and file.size:
                raise ConfigError(
                    "the file became shorter while it was sent",
                    where=str(file.source),
                    remedy="run the command again when no program writes to the file",
                )
