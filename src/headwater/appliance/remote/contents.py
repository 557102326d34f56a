"""The files that clients have sent to an appliance, stored under the SHA-256 of their content, each once."""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from headwater.appliance.types import SAME_VERSION
from headwater.core.errors import QueueError
from headwater.core.files import PARTIAL_SUFFIX, disk_errors

_DIGEST = re.compile(r"[0-9a-f]{64}")
_UNUSED_S = 30 * 86400.0
"""Seconds after which content that no submission has used is deleted."""


class Contents:
    """Contents of files in a folder.

    Args:
        folder: where they are stored.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, digest: str) -> Path:
        """Return the path of a content, which may not exist yet.

        Raises:
            QueueError: if `digest` is not a SHA-256 in hexadecimal digits.
        """
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise QueueError(
                f"expected a SHA-256 of 64 hexadecimal digits, got {digest!r}",
                where="digest of a file",
                remedy=SAME_VERSION,
            )
        return self._folder / digest[:2] / digest

    def received(self, digest: str) -> int | None:
        """Return the number of bytes received of a content, or `None` if it is complete."""
        path = self.path(digest)
        with disk_errors(path):
            if path.exists():
                os.utime(path)  # the content is needed now, so it must not be deleted as unused
                return None
            partial = _partial(path)
            return partial.stat().st_size if partial.exists() else 0

    def add(self, digest: str, size: int, position: int, data: bytes) -> int | None:
        """Store a part of a content.

        Parts may be added again, and by several clients at once: they write equal bytes at equal positions.

        Args:
            digest: SHA-256 of the content.
            size: bytes of the content.
            position: place of the first byte of `data`.
            data: the part.

        Returns:
            The same as `received`. It is not `position + len(data)` if a part before is missing.

        Raises:
            QueueError: if all bytes are there and do not have this SHA-256; they are deleted.
        """
        have = self.received(digest)
        if have is None or not 0 <= position <= have or position + len(data) > size:
            return have
        path = self.path(digest)
        partial = _partial(path)
        with disk_errors(path):
            partial.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(partial, os.O_RDWR | os.O_CREAT, 0o600)
            with os.fdopen(handle, "r+b") as file:
                file.seek(position)
                file.write(data)
                file.flush()
                have = os.fstat(file.fileno()).st_size
                if have < size:
                    return have
                file.seek(0)
                if have > size or hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    partial.unlink(missing_ok=True)
                    raise QueueError(
                        "the received bytes do not have the checksum of the file",
                        where=digest,
                        remedy="submit again; do not change files while they are sent",
                    )
                os.fsync(file.fileno())
            # Another client may have renamed the same content just before.
            with suppress(FileNotFoundError):
                partial.rename(path)
        return None

    def delete_unused(self) -> None:
        """Delete contents and parts of contents that no client has needed for 30 days."""
        oldest = time.time() - _UNUSED_S
        for path in self._folder.glob("*/*"):
            with suppress(OSError):
                if path.stat().st_mtime < oldest:
                    path.unlink()


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL_SUFFIX)
