"""Snapshots: checkpoints written during training, with the weights as they were when the snapshot began."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import final

import torch

from headwater.core.cleanup import on_failure
from headwater.core.errors import HeadwaterError
from headwater.core.stage import StageSpec
from headwater.store.checkpoint_files import CheckpointFiles
from headwater.store.pieces import PieceState
from headwater.store.snapshot_hosts import receive_pieces
from headwater.store.store import WeightStore


@final
class Snapshot:
    """A checkpoint of the store as it is when this object is made. `run` writes it, on any thread.

    Training may continue at once: an update that is committed later first saves the stage that it changes, if
    the stage is not saved yet, on the thread that updates ("copy on write"). A stage is saved once, under its
    lock. An error on a training thread does not stop training; `run` raises it.

    Args:
        store: the store; it has one snapshot at a time. With several ranks, all have called `flush` before.
        folder: the checkpoint; it appears under this name when it is complete.
        step: training steps before it.
        buffers: tensors of the model that are not parameters; written at once.
        extras: further files, by name; written at once.

    Raises:
        DiskFullError: if there is no room; nothing is left behind then.
        StoreError: if some stages have applied a step that has failed or still runs (`updates: in_backward`).
    """

    def __init__(
        self,
        store: WeightStore,
        folder: Path,
        step: int,
        *,
        buffers: Mapping[str, torch.Tensor] | None = None,
        extras: Mapping[str, bytes] | None = None,
    ) -> None:
        # A stage may have values of a step that has failed, or that runs.
        store.access.locks.require_no_lost_step()
        if store.in_backward is not None:
            store.in_backward.require_no_updates()
        self.folder = folder
        self._store = store
        self._step = step
        # Later commits are not part of the checkpoint.
        self._up_to = store.ledger.num_commits
        self._saved: set[int] = set()
        self._failure: HeadwaterError | None = None
        self._hook_before = store.access.before_update
        self._received = receive_pieces(store)
        # A later commit that takes these gradients would become one pending update with the older commits.
        uncommitted = {stage for stage, _ in store.gradients.status.present}
        for stage in store.stages:
            # On this thread, because another thread would need its own workspaces on the device.
            if stage.index in uncommitted or store.tier.on_device(stage.index) is not None:
                store.flush_stage(stage.index)
        self._files = CheckpointFiles(folder, store.stages, store.rule, buffers=buffers, extras=extras)
        # The hook is set last, so that an error above leaves no hook behind.
        store.access.before_update = self._save_first

    def _save_first(self, stage: int, commit: int) -> None:
        """Save a stage before an update changes it. `StageAccess` calls this with the stage's lock held."""
        if commit <= self._up_to:
            return
        try:
            self.save_stage(stage)
        except HeadwaterError as error:
            self._failure = self._failure or error

    def save_stage(self, stage: int) -> None:
        """Save one stage, unless it is saved already.

        Raises:
            HeadwaterError: if it fails, or another stage has failed on another thread.
        """
        with self._store.access.locks.exclusive(stage), torch.no_grad():
            # A checkpoint without one stage is worthless, so the other stages are not written.
            if self._failure is not None:
                raise self._failure
            if stage not in self._saved:
                if self._store.snapshots.link is not None and stage > 0:
                    self.save_stage(stage - 1)  # other hosts send their stages in order
                # Earlier stages are written before, because the pieces of other hosts arrive in that order.
                self._write_stage(self._store.stages[stage])
                self._saved.add(stage)
                # From here on other ranks may change the stage.
                self._store.snapshots.saved.post(stage, self._up_to + 1)

    def _write_stage(self, stage: StageSpec) -> None:
        store = self._store
        with (
            self._files.stage(stage) as files,
            closing(store.parameters.read(stage.index, up_to=self._up_to)) as here,
        ):
            # The scalars are read inside the loop: reading the first piece applies the pending update.
            for piece in itertools.chain(here, self._pieces_of_others(stage.index)):
                files.write(piece, store.scalars.by_stage[stage.index][piece.param])
        self._files.finish_stage(stage, store.scalars.by_stage[stage.index])

    def _pieces_of_others(self, stage: int) -> Iterator[PieceState]:
        return itertools.islice(self._received, len(self._store.ownership.elsewhere(stage)))

    def run(self) -> Path:
        """Save all stages that are not saved yet, then rename the folder to the checkpoint's final name.

        Returns:
            Its folder.

        Raises:
            DiskFullError: if the disk is full; nothing is left behind then.
        """
        try:
            with on_failure(self._files.discard):
                for stage in self._store.stages:
                    self.save_stage(stage.index)
                self._files.publish(self._step)
        finally:
            self._files.wait()
            self._store.access.before_update = self._hook_before
            for _ in self._received:  # also after an error, because other hosts wait until all is received
                pass
            # Also after an error, so that no rank waits for a stage that will never be saved.
            for stage in self._store.stages:
                self._store.snapshots.saved.post(stage.index, self._up_to + 1)
        return self.folder
