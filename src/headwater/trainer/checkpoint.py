"""Checkpoints of a run: writing them while it trains, and finding the newest."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwater.core.errors import ConfigError, CorruptError, HeadwaterError, ModelError, StoreError
from headwater.core.files import disk_errors, is_damage
from headwater.core.safetensors import DTYPES, can_hold
from headwater.core.stage import ParamSpec, StageSpec
from headwater.core.units import format_bytes
from headwater.store.checkpoint_files import write_first
from headwater.store.checkpoint_folder import retire
from headwater.store.rules import UpdateRules
from headwater.store.saved_weights import Buffers
from headwater.store.snapshot import Snapshot
from headwater.store.snapshot_hosts import SnapshotElsewhere
from headwater.store.snapshot_manifest import state_entries
from headwater.store.store import WeightStore
from headwater.trainer.checkpoint_inspection import complete_checkpoints, find_damage
from headwater.trainer.checkpoint_names import folder_of, is_checkpoint, set_aside_names, step_of, surplus
from headwater.trainer.checkpoint_state import pack_state

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Writes and finds the folders `checkpoint_<step>` in a model_dir.

    Finding them needs the folder only. Before `save` the caller must hold the folder's `ModelDirLock`.

    Args:
        model_dir: the folder of the checkpoints.
        keep_n: number of newest checkpoints to keep; all if not given.

    Raises:
        ConfigError: if `keep_n` is less than one.
    """

    def __init__(self, model_dir: Path, keep_n: int | None = None) -> None:
        if keep_n is not None and keep_n < 1:
            raise ConfigError(
                f"expected keep_n >= 1, got {keep_n}", remedy="write 1 or more, or leave keep_n out"
            )
        self.model_dir = model_dir
        self._keep_n = keep_n
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headwater-checkpoint")
        self._writing: Future[None] | None = None
        self._damaged: dict[Path, HeadwaterError] = {}

    def save(
        self,
        store: WeightStore,
        step: int,
        state: Mapping[str, Any],
        *,
        buffers: Buffers | None = None,
    ) -> Path:
        """Begin to write a checkpoint of the store as it is now; training may continue at once.

        Args:
            store: holds weights and optimizer state; it stays open until `wait`.
            step: training steps done.
            state: the rest of the run's state: JSON values and tensors, nested in dictionaries and lists.
            buffers: the model's persistent buffers; see `persistent_buffers`.

        Returns:
            The folder of the checkpoint, which is not yet complete.

        Raises:
            DiskFullError: if there is too little space for this checkpoint, or was too little for the last
                one, which was written in the background. Complete checkpoints stay.
            HeadwaterError: if the previous checkpoint could not be written for another reason.
        """
        self.wait()
        folder = folder_of(self.model_dir, step)
        # The snapshot begins in this thread, because the next step changes the weights.
        snapshot = Snapshot(store, folder, step, buffers=buffers, extras=pack_state(state))
        self._damaged.pop(folder, None)  # a damaged checkpoint of this step is replaced
        self._writing = self._thread.submit(self._finish, snapshot)
        return folder

    def save_first(
        self,
        stages: Sequence[StageSpec],
        rule: UpdateRules,
        read: Callable[[ParamSpec], torch.Tensor],
        state: Mapping[str, Any],
    ) -> Path:
        """Write a checkpoint of step 0 that has given weights, without a store.

        Args:
            stages: the stages.
            rule: how parameters will be updated.
            read: returns the values of a parameter.
            state: see `save`.

        Returns:
            The folder of the checkpoint, which is complete.

        Raises:
            DiskFullError: if there is too little space.
        """
        folder = folder_of(self.model_dir, 0)
        write_first(folder, stages, rule, read, extras=pack_state(state))
        return folder

    def warn_of_full_disk(self, store: WeightStore) -> None:
        """Log a warning if the disk has too little space for a checkpoint of the store."""
        needed = sum(_num_bytes(param, store.rule) for stage in store.stages for param in stage.params)
        with disk_errors(self.model_dir):
            free = shutil.disk_usage(self.model_dir).free
        if free < needed:
            logger.warning(
                "a checkpoint takes %s, but the disk of %s has only %s free; free space there, or name "
                "another model_dir, before the run writes its first checkpoint",
                format_bytes(needed),
                self.model_dir,
                format_bytes(free),
            )

    def save_elsewhere(self, store: WeightStore) -> None:
        """Write this rank's part of a checkpoint that rank 0 begins to `save`.

        Args:
            store: of this rank; it stays open until `wait`.

        Raises:
            RankError: if this rank could not write its part of the previous checkpoint.
        """
        self.wait()
        self._writing = self._thread.submit(SnapshotElsewhere(store).run)

    def _finish(self, snapshot: Snapshot) -> None:
        newest = snapshot.run()
        # Older checkpoints are deleted after `run`, which completes the new one.
        if self._keep_n is not None:
            for path in surplus(complete_checkpoints(self.model_dir), newest, self._keep_n):
                retire(path)

    def check(self) -> None:
        """Raise the error if writing in the background has failed. Does not wait."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Block until nothing is being written.

        Raises:
            HeadwaterError: if the last checkpoint could not be written; those before it are intact.
        """
        # Set to None before the wait, so that an error is raised only once.
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def latest(self) -> Path | None:
        """Return the complete checkpoint with the highest step, if there is one."""
        return max(complete_checkpoints(self.model_dir), key=step_of, default=None)

    def newest_whole(self, *, deep: bool = False) -> Path | None:
        """Return the newest checkpoint without known damage, or `None` if the run has no checkpoints.

        Damaged checkpoints are skipped with a warning.

        Args:
            deep: compare every byte with its checksum. Otherwise weights and optimizer state are compared
                only when they are loaded; if they are damaged, call `skip`, then this function again.

        Raises:
            CorruptError: if all checkpoints are damaged.
            CheckpointError: if a newer version of Headwater wrote one.
            StoreError: if the system refuses to read one.
        """
        paths = complete_checkpoints(self.model_dir)
        for path in reversed(paths):
            damage = None if path in self._damaged else find_damage(path, deep=deep)
            if damage is not None:
                # Not skipped: the file may be intact, and without it the run would lose steps.
                if isinstance(damage, StoreError) and not is_damage(damage):
                    raise damage
                self.skip(path, damage)
            if path not in self._damaged:
                return path
        if paths:
            newest = self._damaged[paths[-1]]
            raise CorruptError(
                f"every checkpoint of this run is damaged; the newest: {newest.what}",
                where=newest.where,
                remedy="restore a checkpoint from a copy, or train from the beginning: headwater fit with "
                "--autoload_last_checkpoint=false",
            ) from newest
        return None

    def skip(self, path: Path, damage: HeadwaterError) -> None:
        """Log a warning about a damaged checkpoint, which `newest_whole` skips from now on.

        Args:
            path: the checkpoint.
            damage: describes the damage.
        """
        # The frames of the traceback would keep the engine that was loading in memory.
        self._damaged[path] = damage.with_traceback(None)
        logger.warning("%s is damaged and skipped: %s", path, damage.what)

    def is_own(self, path: Path) -> bool:
        """True if `path` is named like a checkpoint of this run and is in its model_dir."""
        return is_checkpoint(path) and path.parent.resolve() == self.model_dir.resolve()

    def set_aside(self, step: int, start: Path | None) -> list[Path]:
        """Rename the checkpoints of `step` and later, because a run that starts at `step` makes them again.

        Otherwise they would be the newest ones, and the next run would continue from them.

        Args:
            step: steps done before the run.
            start: the checkpoint that the run starts from; it stays.

        Returns:
            Their new names.
        """
        kept = start and start.resolve()
        later = [path for path in complete_checkpoints(self.model_dir) if step_of(path) >= step]
        with disk_errors(self.model_dir):
            return [path.rename(_unused_name(path)) for path in later if path.resolve() != kept]


def _num_bytes(param: ParamSpec, rule: UpdateRules) -> int:
    """Return the number of bytes of a parameter in a checkpoint, with its optimizer state."""
    states = [(DTYPES[entry.dtype], entry.shape) for entry in state_entries(rule, param).values()]
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in [(param.dtype, param.shape), *states])


def check_tensors(model: nn.Module) -> None:
    """Check that checkpoints can hold the parameters and persistent buffers of a model.

    Raises:
        ModelError: if one of them has a dtype or a layout that the files of a checkpoint cannot have.
    """
    for name, tensor in (*model.named_parameters(), *persistent_buffers(model).items()):
        if not can_hold(tensor):
            raise ModelError(
                f"expected dense tensors of common dtypes, found one of {tensor.layout} and {tensor.dtype}, "
                "which no checkpoint can hold",
                where=f"{type(model).__name__}.{name}",
                remedy="use another dtype; register a buffer that need not be saved with persistent=False",
            )


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> buffer for the persistent buffers of a model. A shared buffer is listed once."""
    return {name: buffer for name, buffer in model.named_buffers() if not _is_transient(model, name)}


def _is_transient(model: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf in model.get_submodule(path)._non_persistent_buffers_set


def _unused_name(path: Path) -> Path:
    """Return a new name for a checkpoint that is set aside. No file has this name."""
    return next(name for name in set_aside_names(path) if not name.exists())
