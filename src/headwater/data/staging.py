"""Staged folders and files: output that appears complete or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from headwater.core.errors import DataError

_LOCK = ".lock"
_KEY = ".key"


@contextlib.contextmanager
def staged_folder(
    target: Path, *, replace: bool = False, key: str = "", keep: str | None = None
) -> Iterator[Path]:
    """Yield a folder beside `target`, which is renamed to `target` when the block ends without an error.

    The folder is empty, or holds the files of an earlier process that used the same `key` and was killed,
    was interrupted, or ended with an error after it had written the file `keep`.

    Args:
        target: folder to create.
        replace: allow `target` to exist; it is removed when the new folder is complete.
        key: identifies the content. Files left under another key, or without a key, are removed first.
        keep: name of a file. After an error the partial files are removed, unless this file is among them.

    Raises:
        DataError: if `target` is a file, if it is not empty and `replace` is not set, or if another process
            is writing it.
    """
    # The folder is renamed to the target, so both must be in one file system, also if the target is a link.
    target = target.resolve()
    check_target(target, replace=replace)
    partial = partial_folder(target)
    partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial / _LOCK, target):
        try:
            if not key or _read(partial / _KEY) != key:
                _empty(partial)
                (partial / _KEY).write_text(key, encoding="utf-8")
            yield partial
            _flush(partial)
            for name in (_LOCK, _KEY):
                (partial / name).unlink()
            _swap(partial, target)
        except Exception:  # any error makes the partial files useless; it is raised again
            # After an interrupt (not an Exception) the partial files stay, and the same command continues
            # with them. After an error the caller may be able to continue from `keep`.
            if keep is None or not (partial / keep).is_file():
                shutil.rmtree(partial, ignore_errors=True)
            raise


def partial_folder(target: Path) -> Path:
    """Return the folder that has the files of `target` until they are complete."""
    target = target.resolve()
    return target.with_name(target.name + ".partial")


def check_target(target: Path, *, replace: bool = False) -> None:
    """Check that a folder can be created at `target`; see `staged_folder`.

    Raises:
        DataError: if `target` is a file, or if it is not empty and `replace` is not set.
    """
    if target.exists() and not target.is_dir():
        raise DataError("expected a folder, found a file", where=str(target), remedy="choose another folder")
    if not replace and target.exists() and any(target.iterdir()):
        remedy = "choose another folder, or use --overwrite if the same command has written it"
        raise DataError("output folder exists and is not empty", where=str(target), remedy=remedy)


def file_marks(paths: Sequence[Path]) -> list[tuple[str, tuple[int, int] | None]]:
    """Return the path, size and time of each file, for the key of a folder that is made of these files."""
    stats = [path.stat() if path.exists() else None for path in paths]
    return [
        (str(path.resolve()), stat and (stat.st_size, stat.st_mtime_ns))
        for path, stat in zip(paths, stats, strict=True)
    ]


@contextlib.contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, which is renamed to `path` when the block ends without an error."""
    partial = path.with_name(path.name + ".partial")
    yield partial
    partial.rename(path)


@contextlib.contextmanager
def _locked(path: Path, target: Path) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            what = "another process is writing this folder"
            raise DataError(what, where=str(target), remedy="wait for it or choose another folder") from error
        yield


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        # This process has locked that file. If it were replaced, another process could lock the new file.
        elif entry.name != _LOCK:
            entry.unlink()


def _flush(folder: Path) -> None:
    """Flush every file below `folder` to disk, so that a renamed folder is complete even after a crash."""
    for entry in [*folder.rglob("*"), folder]:
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _swap(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    # A rename cannot replace a folder with content. The old data are moved away first and removed last, so
    # that a kill in between leaves both complete.
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    target.rename(old)
    partial.rename(target)
    shutil.rmtree(old)
