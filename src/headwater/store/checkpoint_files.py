"""The files of a checkpoint that is being written: weights and optimizer state of each stage, and others."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import final

import torch

from headwater.core.checked_files import CheckedFile
from headwater.core.cleanup import on_failure
from headwater.core.files import PARTIAL_SUFFIX, disk_errors
from headwater.core.safetensors import DTYPE_CODES, DTYPES, TensorFileWriter
from headwater.core.stage import ParamSpec, StageSpec
from headwater.core.transfers import shared_transfers
from headwater.store.checkpoint_folder import publish, remove
from headwater.store.layout import PIECE_ELEMENTS, Scalars
from headwater.store.pieces import PieceState
from headwater.store.rules import UpdateRules
from headwater.store.snapshot_manifest import (
    BUFFERS_FILE,
    MANIFEST_FILE,
    FileEntry,
    Manifest,
    ParamEntry,
    StageEntry,
    TensorEntry,
    encode_scalars,
    state_entries,
    state_name,
)


@final
class StageFiles:
    """The two open files of a stage, with its weights and its optimizer state.

    Args:
        stage: the stage.
        weights: the file of the weights.
        optimizer: the file of the optimizer state.
    """

    def __init__(self, stage: StageSpec, weights: TensorFileWriter, optimizer: TensorFileWriter) -> None:
        self._stage = stage
        self._weights = weights
        self._optimizer = optimizer

    def write(self, piece: PieceState, scalars: Scalars | None) -> None:
        """Write a piece of a parameter.

        Args:
            piece: the piece.
            scalars: the scalars of the parameter; `None` if it was never updated. Then its state has no
                values yet, and zeros are written.
        """
        name = self._stage.params[piece.param].name
        self._weights.write(name, piece.start, piece.master)
        for state, values in piece.states.items():
            if scalars is None:
                self._optimizer.write_zeros(state_name(name, state), piece.start, values.numel())
            else:
                self._optimizer.write(state_name(name, state), piece.start, values)


@final
class CheckpointFiles:
    """A checkpoint that is being written, stage by stage. It has its final name only after `publish`.

    Args:
        folder: the checkpoint.
        stages: the stages; the space of all files is reserved at once.
        rule: how their parameters are updated, which decides the optimizer state.
        buffers: tensors of the model that are not parameters; written at once.
        extras: further files, by name; written at once.

    Raises:
        DiskFullError: if there is no room; nothing is left behind then.
    """

    def __init__(
        self,
        folder: Path,
        stages: Sequence[StageSpec],
        rule: UpdateRules,
        *,
        buffers: Mapping[str, torch.Tensor] | None = None,
        extras: Mapping[str, bytes] | None = None,
    ) -> None:
        self._folder = folder
        self._partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
        self._rule = rule
        self._saved: dict[int, StageEntry] = {}
        self._transfers = shared_transfers()
        self._syncing: list[Future[None]] = []
        with on_failure(self.discard):
            with disk_errors(self._partial):
                remove(self._partial)
                self._partial.mkdir(parents=True)
            self._extras = [self._write_extra(name, data) for name, data in (extras or {}).items()]
            self._extras.append(self._write_buffers(buffers or {}))
            self._weights = [self._weights_file(stage) for stage in stages]
            self._optimizer = [self._optimizer_file(stage) for stage in stages]

    def discard(self) -> None:
        """Remove what was written."""
        self.wait()
        shutil.rmtree(self._partial, ignore_errors=True)

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
            for name, entry in state_entries(self._rule, param).items()
        }
        return TensorFileWriter(self._partial / f"optimizer_{stage.index:04d}.safetensors", tensors)

    @contextmanager
    def stage(self, stage: StageSpec) -> Iterator[StageFiles]:
        """Yield the open files of a stage. Every piece of the stage must be written in the context."""
        weights, optimizer = self._weights[stage.index], self._optimizer[stage.index]
        with ExitStack() as files:
            for file in (weights, optimizer):
                files.enter_context(file)
            yield StageFiles(stage, weights, optimizer)
            # A thread closes these files, so that the next stage is written while they are synced.
            self._syncing.append(self._transfers.threads.submit(files.pop_all().close))

    def finish_stage(self, stage: StageSpec, scalars: Sequence[Scalars | None]) -> None:
        """Record that a stage is written.

        Args:
            stage: the stage.
            scalars: the scalars of each parameter; `None` for one that was never updated.
        """
        entries = list(map(self._param_entry, stage.params, scalars))
        weights, optimizer = self._weights[stage.index], self._optimizer[stage.index]
        self._saved[stage.index] = StageEntry(stage.name, weights.path.name, optimizer.path.name, entries)

    def _param_entry(self, param: ParamSpec, scalars: Scalars | None) -> ParamEntry:
        states = state_entries(self._rule, param)
        return ParamEntry(param.name, DTYPE_CODES[param.dtype], param.shape, states, encode_scalars(scalars))

    def publish(self, step: int) -> None:
        """Write the manifest, then rename the folder to the checkpoint's final name.

        Args:
            step: training steps before the checkpoint.

        Raises:
            DiskFullError: if the disk is full.
        """
        for file in self._syncing:
            file.result()
        files = [*self._extras, *self._weights, *self._optimizer]
        manifest = Manifest(
            step=step,
            optimizer=self._rule.spec.name,
            stages=[self._saved[index] for index in range(len(self._weights))],
            files={file.path.name: FileEntry(file.num_bytes, file.chunks) for file in files},
        )
        # The manifest is written last, because a folder with a manifest is complete.
        self._write_extra(MANIFEST_FILE, manifest.to_json())
        publish(self._partial, self._folder)

    def wait(self) -> None:
        """Block until no thread uses the files."""
        wait(self._syncing)


def write_first(
    folder: Path,
    stages: Sequence[StageSpec],
    rule: UpdateRules,
    read: Callable[[ParamSpec], torch.Tensor],
    *,
    extras: Mapping[str, bytes] | None = None,
) -> None:
    """Write a checkpoint of step 0. No parameter was updated, so the optimizer state has no values yet.

    One parameter is in memory at a time.

    Args:
        folder: the checkpoint; it appears under this name when it is complete.
        stages: the stages.
        rule: how their parameters will be updated, which decides the optimizer state.
        read: returns the values of a parameter; they are converted to the dtype of its master.
        extras: further files, by name.

    Raises:
        DiskFullError: if the disk is full. Nothing is left behind then, nor if `read` fails.
    """
    files = CheckpointFiles(folder, stages, rule, extras=extras)
    with on_failure(files.discard), torch.no_grad():
        for stage in stages:
            with files.stage(stage) as opened:
                for index, spec in enumerate(stage.params):
                    for piece in _pieces(index, read(spec).to(spec.dtype), state_entries(rule, spec)):
                        opened.write(piece, None)
            files.finish_stage(stage, [None] * len(stage.params))
        files.publish(0)


def _pieces(param: int, values: torch.Tensor, states: Mapping[str, TensorEntry]) -> Iterator[PieceState]:
    """Yield the pieces of a parameter that was never updated. The first one has the whole state."""
    start = 0
    # Each state tensor is one expanded element in memory, because only its size counts.
    first = {name: torch.zeros((), device="cpu").expand(entry.shape) for name, entry in states.items()}
    for run in values.reshape(-1).split(PIECE_ELEMENTS):
        yield PieceState(param, start, run, {} if start else first)
        start += run.numel()
