"""Facts of checkpoints that are known without their weights: content, completeness and damage."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from headwater.core.errors import CheckpointError, CorruptError, HeadwaterError, StoreError
from headwater.core.files import lookup_errors
from headwater.store.snapshot_load import SavedCheckpoint
from headwater.store.snapshot_manifest import MANIFEST_FILE
from headwater.trainer.checkpoint_names import is_checkpoint, step_of
from headwater.trainer.checkpoint_state import STATE_FILE, STATE_TENSORS_FILE, unpack_state


def complete_checkpoints(model_dir: Path) -> list[Path]:
    """Return every complete checkpoint in a model_dir, by step.

    Raises:
        ConfigError: if the user may not look into a folder. Without the error a run would start over.
    """
    with lookup_errors():
        # `glob` would skip folders that cannot be read.
        folders = list(filter(is_checkpoint, model_dir.iterdir())) if model_dir.is_dir() else []
        return sorted((path for path in folders if (path / MANIFEST_FILE).is_file()), key=step_of)


def saved_state(saved: SavedCheckpoint) -> dict[str, Any]:
    """Return the state of the run in a checkpoint.

    Raises:
        CheckpointError: if a file is missing.
        CorruptError: if a file is damaged, or does not hold a state.
    """
    tensors = saved.read(STATE_TENSORS_FILE)
    return unpack_state(saved.read(STATE_FILE), tensors, where=str(saved.folder / STATE_FILE))


@dataclasses.dataclass(frozen=True)
class CheckpointDescription:
    """Facts of a checkpoint that are known without reading its weights.

    Attributes:
        path: its folder.
        step: training steps done.
        optimizer: class name of the optimizer.
        num_parameters: number of elements of all parameters.
        num_bytes: bytes on disk.
        state: the state that was given to `CheckpointManager.save`.
    """

    path: Path
    step: int
    optimizer: str
    num_parameters: int
    num_bytes: int
    state: dict[str, Any]


def describe(path: Path) -> CheckpointDescription:
    """Return a description of a checkpoint without reading its weights.

    Raises:
        CheckpointError: if it is missing or not complete.
        CorruptError: if manifest or state are damaged.
    """
    saved = SavedCheckpoint(path)
    manifest = saved.manifest
    return CheckpointDescription(
        path=path,
        step=manifest.step,
        optimizer=manifest.optimizer,
        num_parameters=sum(math.prod(param.shape) for param in manifest.params.values()),
        num_bytes=manifest.num_bytes,
        state=saved_state(saved),
    )


def find_damage(path: Path, *, deep: bool = True) -> HeadwaterError | None:
    """Return an error that describes the damage of a complete checkpoint; `None` if it is intact.

    Args:
        path: its folder.
        deep: compare every byte with its checksum, not only manifest, state, step, and the lengths and
            headers of all files.

    Raises:
        CheckpointError: if it is not complete, or a newer version of Headwater wrote it.
    """
    try:
        saved = SavedCheckpoint(path)
    except StoreError as error:
        return error
    if is_checkpoint(path) and saved.manifest.step != step_of(path):
        return CorruptError(
            f"the folder is named {path.name}, but its manifest says step {saved.manifest.step}",
            where=str(path),
            remedy="rename the folder to its original name",
        )
    try:
        saved_state(saved)
        if deep:
            saved.verify()
        else:
            saved.check_files()
    except (CheckpointError, StoreError) as error:
        return error
    return None
