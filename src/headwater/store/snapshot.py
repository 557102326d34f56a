"""Snapshots: checkpoints written during training, with the weights as they were when the snapshot began."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import final

import torch

from headwater.core.checked_files import CheckedFile
from headwater.core.cleanup import on_failure
from headwater.core.errors import HeadwaterError
from headwater.core.files import PARTIAL_SUFFIX, disk_errors
from headwater.core.safetensors import DTYPE_CODES, DTYPES, TensorFileWriter
from headwater.core.stage import ParamSpec, StageSpec
from headwater.core.transfers import shared_transfers
from headwater.store.checkpoint_folder import publish, remove
from headwater.store.layout import Scalars
from headwater.store.pieces import PieceState
from headwater.store.snapshot_hosts import receive_pieces
from headwater.store.snapshot_manifest import (
    BUFFERS_FILE,
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    ParamEntry,
    StageEntry,
    encode_scalars,
    state_entries,
    state_name,
)
from headwater.store.store import WeightStore


@final
class Snapshot:
    """A checkpoint of the store as it is when this object is made. `run` writes it, on any thread.

    Training may continue at once: an update that is committed later first saves the stage that it changes, if
    the stage is not saved yet, on the thread that updates ("copy on write"). A stage is saved once, under its
    lock. An error on a training thread does not stop training; `run` raises it.

    Args:
        store: the store; it has one snapshot at a time.
        folder: the checkpoint; it appears under this name when it is complete.
        step: training steps before it.
        buffers: tensors of the model that are not parameters; written at once.
        extras: further files, by name; written at once.

    Raises:
        DiskFullError: if there is no room; nothing is left behind then.
        StoreError: if a step has failed after some stages were updated (`updates: in_backward`).
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
        # A stage may have values of a step that has failed.
        store.access.locks.require_no_lost_step()
        self.folder = folder
        self._store = store
        self._partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
        self._step = step
        # Later commits are not part of the checkpoint.
        self._up_to = store.ledger.num_commits
        self._saved: dict[int, StageEntry] = {}
        self._failure: HeadwaterError | None = None
        self._transfers = shared_transfers()
        self._syncing: list[Future[None]] = []
        self._no_hook = store.access.before_update
        self._received = receive_pieces(store)
        with self._nothing_left_on_failure():
            for stage in store.stages:
                # Here, because another thread would need its own workspaces on the device.
                if store.tier.on_device(stage.index) is not None:
                    store.flush_stage(stage.index)
            with disk_errors(self._partial):
                remove(self._partial)
                self._partial.mkdir(parents=True)
            self._extras = [self._write_extra(name, data) for name, data in (extras or {}).items()]
            self._extras.append(self._write_buffers(buffers or {}))
            self._weights = [self._weights_file(stage) for stage in store.stages]
            self._optimizer = [self._optimizer_file(stage) for stage in store.stages]
        # At last: an error above must not leave a hook behind.
        store.access.before_update = self._save_first

    @contextmanager
    def _nothing_left_on_failure(self) -> Iterator[None]:
        """Remove the partial checkpoint if the context raises."""
        with on_failure(lambda: shutil.rmtree(self._partial, ignore_errors=True)):
            yield

    def _write_extra(self, name: str, data: bytes) -> CheckedFile:
        with CheckedFile(self._partial / name, len(data)) as file:
            file.put(0, memoryview(data))
        return file

    def _write_buffers(self, buffers: Mapping[str, torch.Tensor]) -> CheckedFile:
        tensors = {name: (buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()}
        with TensorFileWriter(self._partial / BUFFERS_FILE, tensors) as file:
            for name, buffer in buffers.items():
                file.write(name, 0, buffer.cpu())
        return file

    def _weights_file(self, stage: StageSpec) -> TensorFileWriter:
        tensors = {param.name: (param.dtype, param.shape) for param in stage.params}
        return TensorFileWriter(self._partial / f"weights_{stage.index:04d}.safetensors", tensors)

    def _optimizer_file(self, stage: StageSpec) -> TensorFileWriter:
        tensors = {
            state_name(param.name, name): (DTYPES[entry.dtype], entry.shape)
            for param in stage.params
            for name, entry in state_entries(self._store.rule, param).items()
        }
        return TensorFileWriter(self._partial / f"optimizer_{stage.index:04d}.safetensors", tensors)

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
                # After the stages before it: the pieces of other hosts arrive in that order.
                self._saved[stage] = self._write_stage(self._store.stages[stage])
                # Other ranks may now change the stage.
                self._store.snapshots.saved.post(stage, self._up_to + 1)

    def _write_stage(self, stage: StageSpec) -> StageEntry:
        store, weights, optimizer = self._store, self._weights[stage.index], self._optimizer[stage.index]
        with (
            ExitStack() as files,
            closing(store.parameters.read(stage.index, up_to=self._up_to)) as here,
        ):
            for file in (weights, optimizer):
                files.enter_context(file)
            for piece in itertools.chain(here, self._pieces_of_others(stage.index)):
                param = stage.params[piece.param]
                weights.write(param.name, piece.start, piece.master)
                updated = store.scalars.by_stage[stage.index][piece.param] is not None
                for name, values in piece.states.items():
                    if updated:
                        optimizer.write(state_name(param.name, name), piece.start, values)
                    else:  # the state has no values before the first update
                        optimizer.write_zeros(state_name(param.name, name), piece.start, values.numel())
            # On a thread: the next stage is written while these files are synced.
            self._syncing.append(self._transfers.threads.submit(files.pop_all().close))
        entries = map(self._param_entry, stage.params, store.scalars.by_stage[stage.index])
        return StageEntry(stage.name, weights.path.name, optimizer.path.name, list(entries))

    def _pieces_of_others(self, stage: int) -> Iterator[PieceState]:
        return itertools.islice(self._received, len(self._store.ownership.elsewhere(stage)))

    def _param_entry(self, param: ParamSpec, scalars: Scalars | None) -> ParamEntry:
        states = state_entries(self._store.rule, param)
        return ParamEntry(param.name, DTYPE_CODES[param.dtype], param.shape, states, encode_scalars(scalars))

    def run(self) -> Path:
        """Save all stages that are not saved yet, then rename the folder to the checkpoint's final name.

        Returns:
            Its folder.

        Raises:
            DiskFullError: if the disk is full; nothing is left behind then.
        """
        try:
            with self._nothing_left_on_failure():
                for stage in self._store.stages:
                    self.save_stage(stage.index)
                for file in self._syncing:
                    file.result()
                # At last: a folder with a manifest is complete.
                self._write_extra(MANIFEST_FILE, self._manifest().to_json())
                publish(self._partial, self.folder)
        finally:
            wait(self._syncing)
            self._store.access.before_update = self._no_hook
            for _ in self._received:  # also after an error, because other hosts wait until all is received
                pass
            # Also after an error, so that no rank waits for a stage that will never be saved.
            for stage in self._store.stages:
                self._store.snapshots.saved.post(stage.index, self._up_to + 1)
        return self.folder

    def _manifest(self) -> Manifest:
        files = [*self._extras, *self._weights, *self._optimizer]
        return Manifest(
            step=self._step,
            optimizer=self._store.rule.spec.name,
            stages=[self._saved[stage.index] for stage in self._store.stages],
            files={file.path.name: FileEntry(file.num_bytes, file.chunks) for file in files},
        )
