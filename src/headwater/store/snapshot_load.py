"""Loading of weights and optimizer state into a store, from a checkpoint or from safetensors files."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import final

import torch

from headwater.core.checked_files import OTHER_COPY, FileBytes
from headwater.core.errors import FROM_WEIGHTS, CheckpointError, CorruptError, HeadwaterError, StoreError
from headwater.core.files import is_damage, kind_of
from headwater.core.safetensors import Run, TensorFile, indexed_files, read_runs
from headwater.core.stage import ParamSpec, StageSpec
from headwater.fabric.fabric import Fabric
from headwater.store.layout import Scalars
from headwater.store.pieces import PieceState
from headwater.store.saved_weights import Buffers, Names, SavedWeights
from headwater.store.snapshot_manifest import (
    BUFFERS_FILE,
    MANIFEST_FILE,
    FileEntry,
    ParamEntry,
    TensorEntry,
    decode_scalars,
    read_manifest,
    state_entries,
    state_name,
)
from headwater.store.store import WeightStore

_VERIFY_THREADS = 4
"""Threads that verify files at the same time. With several, `verify` is as fast as the disk."""


class SavedCheckpoint:
    """A complete checkpoint on disk.

    It does not depend on the plan of the run that wrote it: parameters are found by name.

    Args:
        folder: the folder of the checkpoint.

    Attributes:
        manifest: the content of its manifest.

    Raises:
        CheckpointError: if it is missing, not complete, or of a newer version.
        CorruptError: if its manifest is damaged.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            found = kind_of(folder)
            raise CheckpointError(
                "no such checkpoint"
                if found is None
                else f"expected the folder of a checkpoint, found {found}",
                where=str(folder),
                remedy="name a folder checkpoint_<step> in the model_dir; headwater checkpoint import makes "
                "one from other weights",
            )
        self.folder = folder
        self.manifest = read_manifest(folder)

    def tensors(self, file: str) -> TensorFile:
        """Open a safetensors file of the checkpoint; reads are compared with the file's checksums.

        Raises:
            CheckpointError: if the file is missing.
            CorruptError: if the manifest does not list it, or it does not have the listed length.
        """
        return TensorFile(self.folder / file, self._entry(file).chunks)

    def read(self, file: str) -> bytes:
        """Return the content of a file of the checkpoint. Raises the errors of `tensors`."""
        entry = self._entry(file)
        return FileBytes(self.folder / file, entry.chunks).read(0, entry.num_bytes, file)

    def _entry(self, file: str) -> FileEntry:
        if file not in self.manifest.files:
            raise CorruptError(
                f"the manifest does not list {file}, which every checkpoint has",
                where=str(self.folder / MANIFEST_FILE),
                remedy=OTHER_COPY,
            )
        return self.manifest.files[file]

    def check_files(self) -> None:
        """Check that every file exists, has the listed length and, if it holds tensors, an undamaged header.

        Raises:
            CheckpointError: if a file is missing.
            CorruptError: if a length or header is not what was written.
        """
        for name, entry in self.manifest.files.items():
            if name.endswith(".safetensors"):
                self.tensors(name)
            else:
                FileBytes(self.folder / name, entry.chunks)

    def verify(self) -> None:
        """Read every byte and compare it with its checksum, several files at a time.

        Raises:
            CheckpointError: if a file is missing.
            CorruptError: naming the file, and the tensor in it, that is damaged.
        """
        self._entry(BUFFERS_FILE)
        with ThreadPoolExecutor(_VERIFY_THREADS, thread_name_prefix="headwater-verify") as threads:
            for _ in threads.map(self._verify_file, self.manifest.files):
                pass

    def _verify_file(self, name: str) -> None:
        if name.endswith(".safetensors"):
            self.tensors(name).verify()
        else:
            self.read(name)

    def weights(self) -> list[TensorFile]:
        """Return the files of the weights and buffers."""
        stages = [self.tensors(stage.weights_file) for stage in self.manifest.stages]
        return [*stages, self.tensors(BUFFERS_FILE)]

    def restore(self, store: WeightStore, buffers: Buffers | None = None, *, strict: bool = True) -> None:
        """Load the saved weights and optimizer state into a store, bit for bit.

        Args:
            store: the store to fill.
            buffers: tensors of the model that are not parameters, overwritten in place.
            strict: refuse missing and unknown parameters; otherwise a missing one keeps its value.

        Raises:
            CheckpointError: if model or optimizer are not those of the checkpoint; nothing is changed then.
            CorruptError: if bytes are damaged; then the store must be filled again before it is used.
            StoreError: if the system refuses a read, or the store fails; the same holds then.
        """
        buffers = buffers or {}
        weights = self.match(store.stages, buffers, strict=strict)
        _fill(store, weights, buffers, self._states(store))

    def match(self, stages: Sequence[StageSpec], buffers: Buffers, *, strict: bool) -> SavedWeights:
        """Return the saved weights, compared with the names, shapes and dtypes of a model. Reads no values.

        Args:
            stages: the stages of the model.
            buffers: the buffers of the model.
            strict: refuse missing and unknown parameters.

        Raises:
            CheckpointError: if the model is not that of the checkpoint.
        """
        return SavedWeights(self.weights(), stages, buffers, exact=True, strict=strict)

    def _states(self, store: WeightStore) -> _States:
        ours, saved = store.rule.spec.name, self.manifest.optimizer
        if ours != saved:
            raise CheckpointError(
                f"the checkpoint is of a run with the optimizer {saved}, but this run has {ours}",
                where=str(self.folder),
                remedy=f"set the optimizer to {saved}, or {FROM_WEIGHTS}",
            )
        specs = {spec.name: spec for stage in store.stages for spec in stage.params}
        states = {}
        for stage in self.manifest.stages:
            file = self.tensors(stage.optimizer_file)
            for param in stage.params:
                if param.scalars is not None and param.name in specs:
                    self._check_states(store, specs[param.name], param)
                    states[param.name] = _SavedState(file, self._scalars(param))
        return states

    def _scalars(self, param: ParamEntry) -> Scalars | None:
        try:
            return decode_scalars(param.scalars)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(
                f"the optimizer state of {param.name} cannot be read: {error!r}",
                where=str(self.folder / MANIFEST_FILE),
                remedy=OTHER_COPY,
            ) from error

    def _check_states(self, store: WeightStore, spec: ParamSpec, entry: ParamEntry) -> None:
        ours, saved = state_entries(store.rule, spec), entry.states
        if ours != saved:
            raise CheckpointError(
                f"the optimizer state of {spec.name} is {_listed(saved)} in the checkpoint "
                f"and {_listed(ours)} in this run",
                where=str(self.folder),
                remedy="use the optimizer's arguments and the frozen parameters of that run, or "
                f"{FROM_WEIGHTS}",
            )


def _listed(entries: Mapping[str, TensorEntry]) -> str:
    return ", ".join(f"{name} {list(e.shape)} {e.dtype}" for name, e in entries.items()) or "empty"


@dataclasses.dataclass(frozen=True)
class _SavedState:
    """The saved optimizer state of a parameter that was updated at least once."""

    file: TensorFile
    scalars: Scalars | None


_States = Mapping[str, _SavedState]
"""Name of a parameter -> its saved optimizer state."""


def load_weights(
    store: WeightStore,
    source: Path | Sequence[Path],
    buffers: Buffers | None = None,
    *,
    strict: bool = True,
    names: Names = lambda name: (name,),
) -> None:
    """Fill a store with weights from safetensors files. No optimizer state is loaded.

    Args:
        store: the store to fill.
        source: a checkpoint, a folder of safetensors files, a file, or several.
        buffers: tensors of the model that are not parameters, overwritten in place.
        strict: refuse missing and unknown parameters; otherwise a missing one keeps its value.
        names: returns the names of a parameter in the files.

    Raises:
        CheckpointError: if `source` has no files, or if a parameter is missing, unknown, or of another shape;
            nothing is changed then.
        CorruptError: if bytes are damaged; then the store must be filled again before it is used.
    """
    buffers = buffers or {}
    _fill(store, match_weights(store.stages, source, buffers, strict=strict, names=names), buffers, {})


def match_weights(
    stages: Sequence[StageSpec],
    source: Path | Sequence[Path],
    buffers: Buffers,
    *,
    strict: bool,
    names: Names,
) -> SavedWeights:
    """Return weights in files, compared with the names and shapes of a model. Reads no values.

    Args:
        stages: the stages of the model.
        source: see `load_weights`.
        buffers: the buffers of the model.
        strict: refuse missing and unknown parameters.
        names: returns the names of a parameter in the files.

    Raises:
        CheckpointError: if `source` has no files, or if a parameter is missing, unknown, or of another shape.
        StoreError: if the system refuses to read the index of the files.
    """
    return SavedWeights(_weight_files(source), stages, buffers, exact=False, strict=strict, names=names)


def _weight_files(source: Path | Sequence[Path]) -> list[TensorFile]:
    if not isinstance(source, Path):
        if not source:
            raise CheckpointError(
                "expected at least one safetensors file, got an empty list",
                remedy="name the file that holds the weights, or its folder",
            )
        return [TensorFile(path) for path in source]
    if (source / MANIFEST_FILE).is_file():
        return SavedCheckpoint(source).weights()
    if not source.is_dir():
        return [TensorFile(source)]
    indices = sorted(source.glob("*.safetensors.index.json"))
    paths = indexed_files(indices[0]) if indices else list(source.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(
            "the folder holds no safetensors files",
            where=str(source),
            remedy="save the weights with safetensors; pickled weights are not read",
        )
    return [TensorFile(path) for path in sorted(paths)]


@final
class _SavedValues:
    """Values of saved tensors, which are used in the order of their runs. After a failure, no more are read.

    Args:
        runs: where the values lie.

    Attributes:
        failure: the error of a read; `CorruptError` if the files are damaged.
    """

    def __init__(self, runs: Iterator[Run]) -> None:
        self._values = read_runs(runs)
        self.failure: StoreError | None = None

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy the values of the next run to `target`, unless a read has failed."""
        if self.failure is not None:
            return
        try:
            values = next(self._values)
        except CorruptError as error:
            self.failure = error
        except StoreError as error:
            kind = CorruptError if is_damage(error) else StoreError
            self.failure = kind(error.what, where=error.where, remedy=error.remedy)
        else:
            target.copy_(values.view(target.shape))

    def close(self) -> None:
        """End the reads that are under way."""
        self._values.close()


def _fill(store: WeightStore, weights: SavedWeights, buffers: Buffers, states: _States) -> None:
    """Load all values. All ranks call this together, and all raise an error if one of them fails to read."""
    _begin_masks(store, weights)
    buffers = {name: buffer for name, buffer in buffers.items() if name in weights}
    with closing(_SavedValues(_runs(store, weights, buffers, states))) as values:
        for buffer in buffers.values():
            values.copy_to(buffer)
        for stage in store.stages:
            # All ranks replace a stage together. So all must stop before the same one.
            if any(store.fabric.gather(float(values.failure is not None))):
                break
            try:
                _fill_stage(store, stage, weights, states, values)
            except CorruptError as error:
                # The damaged bytes are in the store's own files: the checkpoint is not at fault.
                raise StoreError(error.what, where=error.where, remedy=error.remedy) from error
    _raise_failure(store.fabric, values.failure)


def _begin_masks(store: WeightStore, weights: SavedWeights) -> None:
    """Choose the masks of the parameters that the files hold, before their values are written.

    Only a run of one rank has parameters whose masked elements the store leaves out.
    """
    for stage in store.stages:
        for index, spec in enumerate(stage.params):
            if spec.kept is not None and spec.name in weights:
                store.parameters.masks.begin(
                    (stage.index, index), spec, functools.partial(_whole, store, weights, spec)
                )


def _whole(store: WeightStore, weights: SavedWeights, spec: ParamSpec) -> torch.Tensor:
    """Return all values of a parameter in files."""
    with closing(_SavedValues(iter([weights.run(spec.name, 0, spec.numel)]))) as values:
        found = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        values.copy_to(found)
    _raise_failure(store.fabric, values.failure)
    return found


def _raise_failure(fabric: Fabric, failure: StoreError | None) -> None:
    """Raise the error of this rank, or else the first error of another rank; return if no rank has one."""
    for each in [failure, *fabric.gather_objects(failure, HeadwaterError | None)]:
        if each is not None:
            raise each


def _runs(store: WeightStore, weights: SavedWeights, buffers: Buffers, states: _States) -> Iterator[Run]:
    """Yield the run of each read from the files, in the order in which `_fill` uses the values."""
    for name, buffer in buffers.items():
        yield weights.run(name, 0, buffer.numel())
    for stage in store.stages:
        for piece, start, stop in store.parameters.own_ranges(stage.index):
            name = stage.params[piece.param].name
            if name in weights:
                yield weights.run(name, start, stop - start)
            sizes = {field.name: math.prod(field.shape) for field in piece.fields}
            if name in states:
                for state in store.rule.state_layout(stage.params[piece.param]):
                    count = stop - start if piece.is_compact else sizes[state]
                    yield states[name].file, state_name(name, state), start, count


def _fill_stage(
    store: WeightStore,
    stage: StageSpec,
    weights: SavedWeights,
    states: _States,
    values: _SavedValues,
) -> None:
    absent = {index for index, spec in enumerate(stage.params) if spec.name not in weights}
    kept: dict[tuple[int, int], torch.Tensor] = {}
    if absent:
        pieces = store.parameters.read(stage.index, states=())
        # These are copies, because a piece is valid only until the next one.
        kept = {(p.param, p.start): p.master.clone() for p in pieces if p.param in absent}

    def fill(piece: PieceState) -> None:
        name = stage.params[piece.param].name
        if piece.param in absent:
            piece.master.copy_(kept[piece.param, piece.start])
        else:
            values.copy_to(piece.master)
        if name in states:  # otherwise the first update makes the state, whatever its memory holds
            for state in piece.states.values():
                values.copy_to(state)

    store.parameters.write(stage.index, fill)
    scalars = [states[spec.name].scalars if spec.name in states else None for spec in stage.params]
    # Scalars are set after the tensors, because they say that the state of a parameter has values.
    store.scalars.by_stage[stage.index] = scalars
