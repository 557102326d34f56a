"""Temporary files of a run, in folders to which other users may have access.

[Note: shared scratch folders]
In a folder that others can write to, another user can guess the name of a file and make a link of that name
first. This user would then overwrite the file that the link points to. So such files have no name, or a
random one that is created and never opened again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from headwater.core.errors import StoreError

_NO_UNNAMED = {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}
"""The `errno` values with which systems refuse to open unnamed files."""


def open_unnamed(folder: Path, *, direct: bool = False) -> int:
    """Create a file that has no name, and return its descriptor.

    Args:
        folder: a folder of the file system that holds the file.
        direct: bypass the page cache (O_DIRECT) where the file system can.

    Raises:
        OSError: if no file can be created.
    """
    if direct and hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            return _open_unnamed(folder, os.O_DIRECT)
    return _open_unnamed(folder, 0)


def _open_unnamed(folder: Path, flags: int) -> int:
    flags |= os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(folder, flags | os.O_TMPFILE | os.O_EXCL, 0o600)
    except OSError as error:
        if error.errno not in _NO_UNNAMED or not folder.is_dir():
            raise
    path = folder / f".headwater-{secrets.token_hex(16)}"
    file = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    # At once: nothing is left behind if the process is killed.
    path.unlink()
    return file


def cache_folder() -> Path | None:
    """Return the folder for files that later runs use again; `None` for a user without a home."""
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(root) / "headwater"


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new folder in `parent`, which is removed at the end.

    Folders that killed processes have left there are removed first. Those of other living processes stay.

    Args:
        parent: an existing folder.
        prefix: the first characters of the folder's name.

    Raises:
        OSError: if it cannot be made.
    """
    for left in parent.glob(f"{prefix}*"):
        with _locked(left, wait=False) as free:
            if free:
                shutil.rmtree(left, ignore_errors=True)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with _locked(folder, wait=True) as mine:
            if not mine:
                continue  # another process has removed it, as if a killed process had left it
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[bool]:
    """Lock a folder for the context, and yield True; yield False if it is gone or another process has it."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield folder.exists()
    finally:
        os.close(handle)


def private_folder(path: Path) -> Path:
    """Make a folder that only this user can enter, or restrict an existing one to this user; return it.

    Raises:
        StoreError: if the folder is a link, or belongs to another user.
        OSError: if it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    # Not `stat`: a link of another user must not be followed.
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise StoreError(
            f"expected a folder of this user (uid {os.geteuid()}), got "
            f"{'a folder' if stat.S_ISDIR(found.st_mode) else 'something else'} of uid {found.st_uid}",
            where=str(path),
            remedy="remove it, or set XDG_CACHE_HOME to a folder of this user",
        )
    if found.st_mode & 0o077:
        path.chmod(0o700)
    return path
