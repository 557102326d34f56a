"""A folder that appears complete or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from headwater.core.errors import DataError

_LOCK = ".lock"


@contextlib.contextmanager
def staged_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder beside `target` that takes its name when the block ends without error.

    Whatever a killed predecessor left beside `target` is removed. With `replace`, an existing `target`
    is removed once the new one is complete.

    Raises:
        DataError: if `target` has content and `replace` is not set, or another process is writing it.
    """
    target = target.resolve()
    if not replace and target.exists() and (not target.is_dir() or any(target.iterdir())):
        remedy = "choose another folder, or --overwrite if it holds prepared data"
        raise DataError("output exists and is not empty", where=str(target), remedy=remedy)
    partial = target.with_name(target.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial / _LOCK, target):
        try:
            _empty(partial)
            yield partial
            _flush(partial)
            (partial / _LOCK).unlink()
            _swap(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, target: Path) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            what = "another process is writing this output"
            raise DataError(what, where=str(target), remedy="wait for it or choose another folder") from error
        yield


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()


def _flush(folder: Path) -> None:
    """Brings every file and folder below `folder` to disk, so that a rename never precedes its content."""
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
    old = target.with_name(target.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    target.rename(old)
    partial.rename(target)
    shutil.rmtree(old)
