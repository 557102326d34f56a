"""The folder of a converted or exported checkpoint: it appears when everything is in it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.core.errors import CheckpointError


@contextmanager
def new_folder(out_dir: Path) -> Iterator[Path]:
    """Give a folder to fill, which becomes `out_dir` at the end; an error leaves nothing behind.

    Raises:
        CheckpointError: if `out_dir` is not empty, or the system refuses to write.
    """
    try:
        if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
            raise CheckpointError("the folder is not empty", where=str(out_dir), remedy="name a new folder")
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as scratch:
            partial = Path(scratch) / out_dir.name
            partial.mkdir()
            yield partial
            partial.replace(out_dir)
    except OSError as error:
        raise CheckpointError(
            f"the folder cannot be written: {error.strerror or error}",
            where=str(out_dir),
            remedy="make room or name another folder; nothing was left behind",
        ) from error
