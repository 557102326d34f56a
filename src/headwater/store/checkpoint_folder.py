"""Folders of checkpoints: a folder has its final name only while it is complete."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from headwater.core.files import PARTIAL_SUFFIX, disk_errors, sync_folder

REPLACED_SUFFIX = ".replaced"
"""Suffix of an old checkpoint while a new one of the same step takes its name."""


def publish(partial: Path, folder: Path) -> None:
    """Rename a complete checkpoint to its final name. An older checkpoint of that name is removed.

    If the process is killed at any instant, at least one of the two is left, and `recover` finds it.
    """
    replaced = folder.with_name(folder.name + REPLACED_SUFFIX)
    with disk_errors(folder):
        # The folder's entries must be on disk before the folder gets its final name.
        sync_folder(partial)
        if os.path.lexists(folder):
            remove(replaced)
            folder.rename(replaced)
        # Between the two renames `recover` finds the older checkpoint.
        partial.rename(folder)
        sync_folder(folder.parent)
        remove(replaced)


def recover(model_dir: Path) -> None:
    """Remove the incomplete checkpoints and files that a killed process has left in `model_dir`."""
    with disk_errors(model_dir):
        for replaced in model_dir.glob(f"*{REPLACED_SUFFIX}"):
            folder = replaced.with_name(replaced.name.removesuffix(REPLACED_SUFFIX))
            if folder.exists():
                remove(replaced)
            else:
                replaced.rename(folder)
        for partial in model_dir.glob(f"*{PARTIAL_SUFFIX}"):
            remove(partial)


def retire(folder: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that a partly deleted folder never has its name."""
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    with disk_errors(folder):
        remove(partial)
        folder.rename(partial)
        remove(partial)


def remove(path: Path) -> None:
    """Delete a file, a link, or a folder and all that is in it. Do nothing if `path` does not exist."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
