"""The files in the folder of a run that a client may fetch, as the appliance lists and reads them."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Self

from headwater.appliance.types import SAME_VERSION, read_fields
from headwater.core.errors import QueueError
from headwater.core.files import PARTIAL_SUFFIX

BLOCK = 4 << 20
"""Bytes that are fetched, and compared, at once."""
_SKIPPED = (PARTIAL_SUFFIX, ".replaced", ".lock", ".tmp")
_MAX_FILES = 50_000
_FIELDS = {"path": (str,), "size": (int,), "modified_ns": (int,), "inode": (int,), "changed_ns": (int,)}


@dataclasses.dataclass(frozen=True)
class Artifact:
    """One version of a file. If the file changes, it becomes another artifact.

    Attributes:
        path: path in the folder of the run, with `/`.
        size: bytes.
        modified_ns: time of the last change of the content, in nanoseconds since 1970.
        inode: number of the file in its file system.
        changed_ns: time of the last change of content or attributes, which programs cannot set.
    """

    path: str
    size: int
    modified_ns: int
    inode: int
    changed_ns: int

    def to_record(self) -> dict[str, Any]:
        """Return the fields as values that JSON can represent."""
        return dataclasses.asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Return the artifact of a record that another machine has sent.

        Raises:
            QueueError: if its path is not one inside of a folder, or it has other fields.
        """
        found = cls(**read_fields(record, _FIELDS, "an artifact"))
        path = PurePosixPath(found.path)
        # A file of this name is written on this machine, so its path must not lead out of the folder.
        if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in found.path or found.size < 0:
            raise QueueError(
                f"expected a path inside of the folder of the run, got {found.path!r}",
                where="an artifact",
                remedy=SAME_VERSION,
            )
        return found


def list_artifacts(folder: Path) -> list[Artifact]:
    """Return the regular files below a folder, except those that are still being written; sorted by path.

    Raises:
        QueueError: if there are too many files.
    """
    found = sorted(_walk(folder, ""), key=lambda each: each.path)
    if len(found) > _MAX_FILES:
        raise QueueError(
            f"expected at most {_MAX_FILES} files in the folder of the run, got {len(found)}",
            where=str(folder),
            remedy="follow the job with --artifacts none, and copy the files with rsync",
        )
    return found


def _walk(folder: Path, prefix: str) -> Iterator[Artifact]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return  # the folder was removed, or does not exist yet
    for entry in entries:
        if entry.name.endswith(_SKIPPED) or not _is_text(entry.name):
            continue
        path = f"{prefix}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(folder / entry.name, f"{path}/")
        elif entry.is_file(follow_symlinks=False):
            try:
                yield _artifact(path, entry.stat(follow_symlinks=False))
            except OSError:
                continue  # it was removed meanwhile


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _artifact(path: str, found: os.stat_result) -> Artifact:
    return Artifact(path, found.st_size, found.st_mtime_ns, found.st_ino, found.st_ctime_ns)


def _begins_with(found: os.stat_result, artifact: Artifact) -> bool:
    """True if a file is the artifact, or was appended to since, as the history of a running job always is.

    The attributes of a file that was rewritten in place with more bytes look the same. Such a file is listed
    with another size the next time, and is then copied again.
    """
    if found.st_size > artifact.size:
        return found.st_ino == artifact.inode
    return _artifact(artifact.path, found) == artifact


def digest_of(listed: Sequence[Artifact]) -> str:
    """Return a digest of a list of artifacts, which shows if two lists differ."""
    return hashlib.sha256(repr(listed).encode()).hexdigest()


def read_block(folder: Path, artifact: Artifact, position: int, known: str | None) -> tuple[str, bytes]:
    """Return the state of a block of an artifact, and its bytes.

    Args:
        folder: the folder of the run.
        artifact: the artifact.
        position: place of the first byte of the block.
        known: SHA-256 of the block that the client has; `None` if it has no such block.

    Returns:
        `same` without bytes if the block has the SHA-256 `known`; `data` with its bytes; or `changed` without
        bytes if the file has changed or was removed since it was listed. A file that was only appended to has
        not changed: it still begins with the listed version.

    Raises:
        QueueError: if the position is negative.
    """
    if position < 0:
        raise QueueError(
            f"expected a position of at least 0, got {position}",
            where=f"the request to read {artifact.path}",
            remedy=SAME_VERSION,
        )
    try:
        handle = os.open(folder / artifact.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return "changed", b""
    with os.fdopen(handle, "rb") as file:
        size = max(min(BLOCK, artifact.size - position), 0)
        file.seek(position)
        data = file.read(size)
        # The attributes are read after the content, so that they show a change before or during the read.
        found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or not _begins_with(found, artifact) or len(data) != size:
        return "changed", b""
    if known is not None and hashlib.sha256(data).hexdigest() == known:
        return "same", b""
    return "data", data
