"""Names of a run's checkpoints, and decisions that need only the names. Nothing here reads a file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

PREFIX = "checkpoint_"
"""The name of a checkpoint is this prefix and its step."""

_NAME = re.compile(rf"{PREFIX}(\d+)")
_SET_ASIDE_SUFFIX = ".superseded"


def folder_of(model_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return model_dir / f"{PREFIX}{step}"


def is_checkpoint(path: Path) -> bool:
    """True if a path is named like a complete checkpoint.

    Longer names are those of checkpoints that are incomplete or were set aside.
    """
    return _NAME.fullmatch(path.name) is not None


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, f"{path.name} is not the name of a checkpoint"
    return int(match[1])


def surplus(complete: Sequence[Path], newest: Path, keep_n: int) -> list[Path]:
    """Return the checkpoints to delete, so that `newest` and `keep_n - 1` others are left.

    Args:
        complete: the complete checkpoints, by step.
        newest: the checkpoint that was written last.
        keep_n: number of checkpoints to keep, at least one.
    """
    others = [path for path in complete if path != newest]
    return others[: max(len(others) - (keep_n - 1), 0)]


def set_aside_names(path: Path) -> Iterator[Path]:
    """Yield names for a checkpoint that was set aside, best first. None of them is that of a checkpoint."""
    yield path.with_name(f"{path.name}{_SET_ASIDE_SUFFIX}")
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}{_SET_ASIDE_SUFFIX}{number}")
