"""Output folder of a converted or exported checkpoint, which appears when it is complete."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.core.errors import CheckpointError


@contextmanager
def new_folder(out_dir: Path) -> Iterator[Path]:
    """Yield a folder to fill, which is renamed to `out_dir` at the end; after an error it is removed.

    Raises:
        CheckpointError: if `out_dir` is not empty, or cannot be written.
    """
    try:
        if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
            what = (
                "the output folder is not empty"
                if out_dir.is_dir()
                else "expected a new folder, found a file"
            )
            raise CheckpointError(what, where=str(out_dir), remedy="name a new folder")
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target: a rename stays in one file system. A folder inside, because tempfile makes its
        # own folders readable only for their owner.
        with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}-", dir=out_dir.parent) as scratch:
            partial = Path(scratch) / out_dir.name
            partial.mkdir()
            yield partial
            partial.replace(out_dir)
    except OSError as error:
        raise CheckpointError(
            f"the output folder cannot be written: {error.strerror or error}",
            where=str(out_dir),
            remedy="free disk space or name another folder; partial files were removed",
        ) from error
