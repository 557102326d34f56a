"""Checkpoint folders of a Hugging Face `Trainer` that get their names when they are complete."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headwater.core.files import disk_errors, sync_file, sync_folder
from headwater.core.scratch import scratch_folder
from headwater.fabric.membership import current

_PREFIX = "_saving-"
"""First characters of the name of a staging folder. Uploads of the `Trainer` leave out names with `_`."""


@contextmanager
def staged_checkpoint(run_folder: Path, name: str) -> Iterator[Path]:
    """Yield a new folder, the same on all ranks, in which a `Trainer` saves one checkpoint.

    The folder has an empty folder for each other checkpoint of the run. So the `Trainer` chooses there, by
    its own rules, which one is the best and which ones are deleted. At the end, the checkpoint is moved to
    the run's folder, and those that were deleted are removed there. Each of these is one rename, so a kill at
    any moment leaves only complete checkpoints. What a killed process has left is removed at the next save.

    Args:
        run_folder: the folder of the run's checkpoints.
        name: name of the folder of the checkpoint.

    Raises:
        DiskFullError: if the disk is full. The other checkpoints stay, and the staging folder is removed.
        StoreError: for other errors of the disk.
    """
    with ExitStack() as on_rank_0:

        def make() -> str:
            with disk_errors(run_folder):
                run_folder.mkdir(parents=True, exist_ok=True)
                staging = on_rank_0.enter_context(scratch_folder(run_folder, _PREFIX))
                if (run_folder / name).is_dir() and not (run_folder / name / "trainer_state.json").exists():
                    # The beginning of this checkpoint: for `enable_jit_checkpoint`, files are there already.
                    (run_folder / name).rename(staging / name)
                for other in run_folder.glob("checkpoint-*"):
                    if other.is_dir() and other.name != name:
                        _stand_in(other, staging)
            return str(staging)

        staging = Path(current().agree(make, str, "a folder for a checkpoint"))
        others = [path.name for path in staging.iterdir() if path.name != name]
        yield staging
        current().barrier("files of a checkpoint")  # before the rename: each rank has written its files
        current().agree(lambda: _publish(staging, run_folder, name, others), None, "a complete checkpoint")


def _stand_in(checkpoint: Path, staging: Path) -> None:
    """Make an empty folder with the name and the time of a checkpoint. The `Trainer` deletes the oldest."""
    folder = staging / checkpoint.name
    folder.mkdir()
    found = checkpoint.stat()
    os.utime(folder, ns=(found.st_atime_ns, found.st_mtime_ns))


def _publish(staging: Path, run_folder: Path, name: str, others: list[str]) -> None:
    """Move a checkpoint to the run's folder, and move those that were deleted in `staging` there."""
    with disk_errors(run_folder):
        if (staging / name).is_dir():
            for path in (staging / name).rglob("*"):
                if path.is_file():
                    sync_file(path)  # after a loss of power, files of a new name could be empty
            if (run_folder / name).exists():  # of an earlier run
                (run_folder / name).rename(staging / f"{name}.old")
            (staging / name).rename(run_folder / name)
            sync_folder(run_folder)
        # Afterwards: until here the deleted checkpoints may be the only ones.
        for other in others:
            if not (staging / other).exists() and (run_folder / other).exists():
                (run_folder / other).rename(staging / other)
