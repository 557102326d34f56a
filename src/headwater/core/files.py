"""Files and folders that survive a loss of power, and clear errors for what the system refuses."""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headwater.core.errors import ConfigError, CorruptError, DiskFullError, RunError, StoreError

PARTIAL_SUFFIX = ".partial"
"""Suffix of a file or folder that is still being written, or that is being deleted."""

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}
_REFUSED = {*_NOT_ALLOWED, errno.ENAMETOOLONG}
_BAD_BYTES = {errno.EIO, errno.EBADMSG, errno.EUCLEAN, errno.ENODATA}
_TOO_MANY = {errno.EMFILE, errno.ENFILE}
_WRONG_KIND = {errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ELOOP}
_MAKE_WAY = "move it away, or name another folder"
_MAKE_WRITABLE = "give this user the right to write there, or name another folder"
_MAKE_REACHABLE = "give this user the right to it and to the folders on the way to it, or name another path"
_ALLOW_MORE = "allow this user more open files, for example with ulimit -n 65536"
_AROUND = 100
"""Characters of a long line that an error shows on each side of the fault."""
_OTHER_DISK = "check the disk and how it is mounted, or name a folder on another disk"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Enter a context in which an `OSError` becomes an error of this project that names `path` and a remedy.

    Args:
        path: what is read or written; the place in the message unless the system names another file.

    Raises:
        DiskFullError: if there is no room.
        StoreError: for any other error of the system.
    """
    try:
        yield
    except OSError as error:
        raise _explained(error, path) from error


@contextmanager
def lookup_errors() -> Iterator[None]:
    """Enter a context in which an `OSError` for a path that the user may not look up becomes a `ConfigError`.

    Python's `Path.is_file` and the like return false for a missing file, but raise such errors.

    Raises:
        ConfigError: if the user has no right to a file or to a folder on the way to it, or its name is too
            long. Other errors of the system are raised unchanged.
    """
    try:
        yield
    except OSError as error:
        if not isinstance(error.filename, str) or error.errno not in _REFUSED:
            raise
        too_long = error.errno == errno.ENAMETOOLONG
        raise ConfigError(
            f"a path cannot be used: {error.strerror}",
            where=_around(error.filename, 0),
            remedy="name a shorter path" if too_long else _MAKE_REACHABLE,
        ) from error


def is_damage(error: StoreError) -> bool:
    """Return true if a read failed because the bytes on disk are damaged.

    Return false if the system refused the read, for example because too many files are open.
    """
    cause = error.__cause__
    return isinstance(error, CorruptError) or (isinstance(cause, OSError) and cause.errno in _BAD_BYTES)


def _explained(error: OSError, path: Path) -> StoreError:
    if error.errno in _NO_SPACE:
        return DiskFullError(
            f"no space left for {path.name}",
            where=str(path),
            remedy="free space there or name a folder on a larger disk",
        )
    found = Path(error.filename) if isinstance(error.filename, str) else path
    why = error.strerror or str(error)
    if error.errno in _NOT_ALLOWED:
        return StoreError(f"{path.name}: {why}", where=str(found), remedy=_MAKE_WRITABLE)
    if error.errno in _TOO_MANY:
        return StoreError(f"{path.name}: {why}", where=str(found), remedy=_ALLOW_MORE)
    obstacle = obstacle_on(found) if error.errno in _WRONG_KIND else None
    if obstacle is None:
        return StoreError(f"{path.name}: {why}", where=str(found), remedy=_OTHER_DISK)
    place, kind = obstacle
    if error.errno == errno.EEXIST:
        what = f"{path.name} cannot be created, because {kind} is there"
    else:
        what = f"{path.name}: {why}; found {kind}"
    return StoreError(what, where=str(place), remedy=_MAKE_WAY)


def why_unreadable(error: Exception) -> str:
    """Return why a file cannot be read, for an error whose place is the file.

    The path and number of an error of the system are left out, and so are the names of Python's codecs.
    """
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON: {error}"
    # The text of these errors is a key or names a type, and says nothing without the class.
    return repr(error) if isinstance(error, (LookupError, TypeError, AttributeError)) else str(error)


def obstacle_on(path: Path) -> tuple[Path, str] | None:
    """Return `path` if it exists, or the file or dangling link on the way to it, with its kind; or `None`."""
    for place in (path, *path.parents):
        kind = kind_of(place)
        if kind is not None:
            return None if place != path and kind == "a folder" else (place, kind)
    return None


def unencodable(error: UnicodeEncodeError) -> ConfigError:
    """Return the error for a text, usually a file's name, that the encoding of files cannot represent."""
    encoding = sys.getfilesystemencoding()
    found = _around(error.object, error.start)
    if encoding == "utf-8":
        return ConfigError(
            f"expected text in UTF-8, got {found!a}",
            remedy="rename the file, or correct the text",
        )
    return ConfigError(
        f"expected text that the encoding {encoding} can represent, got {found!a}",
        where="locale of this process (LC_ALL, LC_CTYPE, LANG)",
        remedy="set PYTHONUTF8=1, or a locale in UTF-8, for example LC_ALL=C.UTF-8",
    )


def _around(text: str, position: int) -> str:
    """Return the line of a text that has a position, or the part of a long line around the position."""
    begin = max(text.rfind("\n", 0, position) + 1, position - _AROUND)
    end = text.find("\n", position)
    return text[begin : min(len(text) if end < 0 else end, position + _AROUND)]


def is_file(path: Path) -> bool:
    """True if `path` is an existing regular file, and not a folder or a pipe.

    False if the system cannot look up the path: its name is too long (a word of a command line may be the
    text of a program), or the user may not read its folder.
    """
    try:
        return path.is_file()
    except OSError:
        return False


def kind_of(path: Path) -> str | None:
    """Return in words what is at `path` (a file, a folder, …), or `None` if nothing is there."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return None
    if stat.S_ISLNK(mode):
        target = kind_of(path.resolve())
        return f"a link to {path.readlink()}, which does not exist" if target is None else target
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a special file")


def check_place(path: Path, *, expected: str) -> None:
    """Raise if a file or folder cannot be written at `path`. Called before work that would be lost.

    Args:
        path: what will be opened, or created with its missing parents.
        expected: `a file` or `a folder`.

    Raises:
        RunError: if something else lies there, or this user may not write it.
    """
    found = kind_of(path)
    if found not in (None, expected):
        raise RunError(f"expected {expected} or nothing, found {found}", where=str(path), remedy=_MAKE_WAY)
    place = path if found else next((each for each in path.parents if kind_of(each)), path)
    kind = kind_of(place)
    if found is None and kind != "a folder":
        raise RunError(f"expected a folder, found {kind}", where=str(place), remedy=_MAKE_WAY)
    needed = os.W_OK | (os.X_OK if kind == "a folder" else 0)
    if not os.access(place, needed, effective_ids=True):
        raise RunError(
            f"expected {kind} that this user (uid {os.geteuid()}) can write, found a read-only one",
            where=str(place),
            remedy=_MAKE_WRITABLE,
        )


def check_replaceable(path: Path) -> None:
    """Raise if `path` is a folder or a device: a file must not replace it. It may replace a pipe or a link.

    Raises:
        RunError: if one of these lies there. A link to a device or a pipe, such as `/dev/stdout`, counts as a
            device.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if stat.S_ISDIR(mode) and not path.is_symlink():
        raise RunError("expected a file or nothing, found a folder", where=str(path), remedy=_MAKE_WAY)
    is_pipe = stat.S_ISFIFO(mode) and not path.is_symlink()
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or is_pipe):
        # A user with the right to it would replace `/dev/null` by a file, for all programs of the machine.
        raise RunError(
            "expected a file or nothing, found a device",
            where=str(path),
            remedy="write to a file; to see its content, print the file afterwards",
        )


def sync_folder(folder: Path) -> None:
    """Write the entries of a folder to the disk, so that they survive a loss of power."""
    sync_file(folder)


def sync_file(path: Path) -> None:
    """Write the content of a file to the disk, so that it survives a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_at(handle: int, path: Path) -> bool:
    """True if an open file is still the file at `path`, and was not removed or replaced."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents; their names survive a loss of power."""
    # Listed before they exist: each of their names must be synced in its parent.
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file atomically: after a crash, `path` has either the old content or the new one.

    Raises:
        RunError: if a folder or a device lies there.
        DiskFullError: if there is too little space; the old content stays.
    """
    check_replaceable(path)
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with disk_errors(path):
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                # Before the rename: else a loss of power could leave an empty file under the name.
                os.fsync(file.fileno())
            # Atomic, also over an existing file.
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                partial.unlink()
            raise
        # The new name itself must survive a loss of power.
        sync_folder(path.parent)
