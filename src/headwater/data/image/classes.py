"""Files in a folder for each class, as ImageNet is distributed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headwater.core.errors import DataError


def find_classes(
    root: Path, is_sample: Callable[[Path], bool], num_classes: int | None = None
) -> tuple[list[Path], list[int]]:
    """The files in a folder for each class, and their classes, numbered in the order of the folders' names.

    Args:
        root: folder of the folders.
        is_sample: which files count.
        num_classes: of the model; as many as there are if not given.

    Raises:
        DataError: if there are no files, or more classes than the model has.
    """
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    if num_classes is not None and len(folders) > num_classes:
        raise DataError(
            f"there are {len(folders)} classes, and the model's num_classes is {num_classes}",
            where=str(root),
            remedy=f"set num_classes to {len(folders)}",
        )
    files: list[Path] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        found = sorted(filter(is_sample, folder.iterdir()))
        files += found
        labels += [label] * len(found)
    if not files:
        raise DataError(
            "there are no images in folders of classes",
            where=str(root),
            remedy=f"put them into {root}/CLASS/, or name another data_dir or split",
        )
    return files, labels
