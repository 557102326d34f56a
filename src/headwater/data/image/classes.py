"""Files in one folder per class, as in ImageNet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from headwater.core.errors import DataError


def find_classes(
    root: Path, is_sample: Callable[[Path], bool], num_classes: int | None = None
) -> tuple[list[Path], list[int]]:
    """Find the files in one folder per class.

    Args:
        root: folder that holds the folders of the classes.
        is_sample: True for a file that is a sample.
        num_classes: classes of the model; `None`: any number.

    Returns:
        The files, and the class of each. Classes are numbered in the order of the folders' names.

    Raises:
        DataError: if no file is found, or the folders have more classes than the model.
    """
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    if num_classes is not None and len(folders) > num_classes:
        raise DataError(
            f"found {len(folders)} classes, but the model's num_classes is {num_classes}",
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
            "no images found: expected a folder for each class, with its images",
            where=str(root),
            remedy=f"put the images into {root}/CLASS/, or set another data_dir or split",
        )
    return files, labels
