"""Loading of weights and optimizer state into a store, from a checkpoint or from safetensors files."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from headwater.core.errors import CheckpointError, CorruptError
from headwater.core.files import FileBytes
from headwater.core.safetensors import TensorFile
from headwater.core.stage import MAY_BE_MISSING, ParamSpec, StageSpec
from headwater.store.pieces import PieceState
from headwater.store.rule import Scalars
from headwater.store.snapshot import BUFFERS_FILE, state_entries, state_name
from headwater.store.snapshot_manifest import (
    MANIFEST_FILE,
    FileEntry,
    ParamEntry,
    TensorEntry,
    decode_scalars,
    read_manifest,
)
from headwater.store.store import WeightStore

Buffers = Mapping[str, torch.Tensor]
"""Tensors of the model that are not parameters, by name; they are overwritten in place."""

Names = Callable[[str], Sequence[str]]
"""Returns the names of a parameter in files, the best first, from its name in the model.

With `MAY_BE_MISSING` last the parameter may be missing, and then keeps its value.
"""

_VERIFY_THREADS = 4
"""Checksums of several files are computed at once, so that `verify` is as fast as the disk."""

_OTHER_MODEL = (
    "the weights are of another model; set its section to what they were trained with, or begin a new run "
    "with what they have for it: callback LoadCheckpointStates: model"
)


class SavedCheckpoint:
    """A complete checkpoint on disk.

    It does not depend on the plan of the run that wrote it: parameters are found by name.

    Args:
        folder: where it is.

    Attributes:
        manifest: what it holds.

    Raises:
        CheckpointError: if it is missing, not complete, or of a newer version.
        CorruptError: if its manifest is damaged.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(
                "there is no such checkpoint",
                where=str(folder),
                remedy="name a folder checkpoint_<step> in the model_dir",
            )
        self.folder = folder
        self.manifest = read_manifest(folder)

    def tensors(self, file: str) -> TensorFile:
        """Open one of its safetensors files; all that is read from it is compared with its checksums.

        Raises:
            CheckpointError: if the file is missing.
            CorruptError: if the manifest does not list it, or it does not have the listed length.
        """
        return TensorFile(self.folder / file, self._entry(file).chunks)

    def read(self, file: str) -> bytes:
        """Return the content of one of its files; raises as `tensors` does."""
        entry = self._entry(file)
        return FileBytes(self.folder / file, entry.chunks).read(0, entry.num_bytes, file)

    def _entry(self, file: str) -> FileEntry:
        if file not in self.manifest.files:
            raise CorruptError(
                f"the manifest does not list {file}, which every checkpoint has",
                where=str(self.folder / MANIFEST_FILE),
                remedy="use another checkpoint, or another copy of this one",
            )
        return self.manifest.files[file]

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
        """Load weights and optimizer state, to the same bits.

        Args:
            store: the store to fill.
            buffers: tensors of the model that are not parameters, overwritten in place.
            strict: refuse missing and unknown parameters; otherwise a missing one keeps its value.

        Raises:
            CheckpointError: if model or optimizer are not those of the checkpoint; nothing is changed then.
            CorruptError: if bytes are damaged; then the store must not be used.
        """
        buffers = buffers or {}
        weights = _Weights(self.weights(), store, buffers, exact=True, strict=strict)
        _fill(store, weights, buffers, self._states(store))

    def _states(self, store: WeightStore) -> _States:
        ours, saved = store.rule.spec.name, self.manifest.optimizer
        if ours != saved:
            raise CheckpointError(
                f"the checkpoint is of a run with {saved}, this one has {ours}",
                where=str(self.folder),
                remedy=f"set the optimizer to {saved}, or load the weights alone",
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
                remedy="use another checkpoint, or another copy of this one",
            ) from error

    def _check_states(self, store: WeightStore, spec: ParamSpec, entry: ParamEntry) -> None:
        ours, saved = state_entries(store.rule, spec), entry.states
        if ours != saved:
            raise CheckpointError(
                f"the optimizer state of {spec.name} is {_listed(saved)} in the checkpoint "
                f"and {_listed(ours)} in this run",
                where=str(self.folder),
                remedy="set the optimizer's arguments, and what is frozen, as they were, "
                "or load the weights alone",
            )


def _listed(entries: Mapping[str, TensorEntry]) -> str:
    return ", ".join(f"{name} {list(e.shape)} {e.dtype}" for name, e in entries.items()) or "empty"


@dataclasses.dataclass(frozen=True)
class _SavedState:
    """Optimizer state of a parameter that was updated at least once."""

    file: TensorFile
    scalars: Scalars | None


_States = Mapping[str, _SavedState]
"""By the parameter's name."""


def load_weights(
    store: WeightStore,
    source: Path | Sequence[Path],
    buffers: Buffers | None = None,
    *,
    strict: bool = True,
    names: Names = lambda name: (name,),
) -> None:
    """Fill a store with weights from safetensors files. The optimizer starts without state.

    Args:
        store: the store to fill.
        source: a checkpoint, a folder of safetensors files, a file, or several.
        buffers: tensors of the model that are not parameters, overwritten in place.
        strict: refuse missing and unknown parameters; otherwise a missing one keeps its value.
        names: returns the names of a parameter in the files.

    Raises:
        CheckpointError: if a parameter is missing, unknown, or of another shape; nothing is changed then.
        CorruptError: if bytes are damaged; then the store must not be used.
    """
    buffers = buffers or {}
    weights = _Weights(_weight_files(source), store, buffers, exact=False, strict=strict, names=names)
    _fill(store, weights, buffers, {})


def _weight_files(source: Path | Sequence[Path]) -> list[TensorFile]:
    if not isinstance(source, Path):
        return [TensorFile(path) for path in source]
    if (source / MANIFEST_FILE).is_file():
        return SavedCheckpoint(source).weights()
    if not source.is_dir():
        return [TensorFile(source)]
    indices = sorted(source.glob("*.safetensors.index.json"))
    names = _indexed(indices[0]) if indices else [path.name for path in source.glob("*.safetensors")]
    if not names:
        raise CheckpointError(
            "the folder holds no safetensors files",
            where=str(source),
            remedy="save the weights with safetensors; pickled weights are not read",
        )
    return [TensorFile(source / name) for name in sorted(names)]


def _indexed(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the index cannot be read: {error!r}", where=str(index), remedy="copy the file again"
        ) from error


class _Weights:
    """Weights of a whole model in files, checked against a store before any of them is read.

    Args:
        files: the files.
        store: the store that they fill.
        buffers: tensors beside the store's parameters.
        exact: require the dtypes of the store.
        strict: refuse missing and unknown parameters and buffers.
        names: returns the names of a parameter in the files.
    """

    def __init__(
        self,
        files: Sequence[TensorFile],
        store: WeightStore,
        buffers: Buffers,
        *,
        exact: bool,
        strict: bool,
        names: Names = lambda name: (name,),
    ) -> None:
        self._names = names
        self._files = {name: file for file in files for name in file.places}
        self._where = str(files[0].path.parent)
        self._exact = exact
        wanted = [ParamSpec(n, tuple(b.shape), b.dtype, b.dtype) for n, b in buffers.items()]
        wanted += [spec for stage in store.stages for spec in stage.params]
        self._saved_names = self._match(wanted)
        if strict:
            self._refuse_missing(wanted)
            self._refuse_unknown(wanted)
        for spec in wanted:
            if spec.name in self:
                self._check(spec)

    def __contains__(self, name: str) -> bool:
        return name in self._saved_names

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """Return a run of elements of a parameter or buffer, 1-D."""
        saved = self._saved_names[name]
        return self._files[saved].read(saved, start, count)

    def _match(self, wanted: Iterable[ParamSpec]) -> dict[str, str]:
        """Return the name in the files by the name in the model, for parameters that the files hold."""
        found = {spec.name: [n for n in self._candidates(spec) if n in self._files] for spec in wanted}
        return {name: names[0] for name, names in found.items() if names}

    def _candidates(self, spec: ParamSpec) -> list[str]:
        return [name for own in (spec.name, *spec.aliases) for name in self._names(own)]

    def _refuse_missing(self, wanted: Iterable[ParamSpec]) -> None:
        for spec in wanted:
            if spec.name not in self and MAY_BE_MISSING not in self._candidates(spec):
                raise CheckpointError(
                    f"{spec.name} is missing; {_nearest(spec.name, self._files, 'the files hold')}",
                    where=self._where,
                    remedy=_OTHER_MODEL,
                )

    def _refuse_unknown(self, wanted: Iterable[ParamSpec]) -> None:
        known = {name for spec in wanted for name in self._candidates(spec)}
        for name, file in self._files.items():
            if name not in known:
                raise CheckpointError(
                    f"the model has no {name}; {_nearest(name, known, 'it has')}",
                    where=str(file.path),
                    remedy=_OTHER_MODEL,
                )

    def _check(self, spec: ParamSpec) -> None:
        saved = self._saved_names[spec.name]
        file = self._files[saved]
        place = file.places[saved]
        if place.shape != spec.shape:
            raise CheckpointError(
                f"{spec.name} has shape {place.shape} in the file and {spec.shape} in the model",
                where=str(file.path),
                remedy=_OTHER_MODEL,
            )
        if place.dtype != spec.dtype and (self._exact or not place.dtype.is_floating_point):
            raise CheckpointError(
                f"{spec.name} is {place.dtype} in the file and {spec.dtype} in the model",
                where=str(file.path),
                remedy="save the weights in the model's own dtype",
            )


def _nearest(name: str, names: Iterable[str], intro: str) -> str:
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return f"{intro} {', '.join(close)}" if close else "no name is near it"


def _fill(store: WeightStore, weights: _Weights, buffers: Buffers, states: _States) -> None:
    for name, buffer in buffers.items():
        if name in weights:
            buffer.copy_(weights.read(name, 0, buffer.numel()).view(buffer.shape))
    for stage in store.stages:
        _fill_stage(store, stage, weights, states)


def _fill_stage(store: WeightStore, stage: StageSpec, weights: _Weights, states: _States) -> None:
    absent = {index for index, spec in enumerate(stage.params) if spec.name not in weights}
    kept: dict[tuple[int, int], torch.Tensor] = {}
    if absent:
        pieces = store.parameters.read(stage.index, with_states=False)
        kept = {(p.param, p.start): p.master.clone() for p in pieces if p.param in absent}

    def fill(piece: PieceState) -> None:
        name, count = stage.params[piece.param].name, piece.master.numel()
        known = piece.param not in absent
        piece.master.copy_(
            weights.read(name, piece.start, count) if known else kept[piece.param, piece.start]
        )
        for state, values in piece.states.items():
            if name in states:
                saved = states[name].file.read(state_name(name, state), piece.start, values.numel())
                values.copy_(saved.view(values.shape))
            else:
                values.zero_()

    store.parameters.write(stage.index, fill)
    scalars = [states[spec.name].scalars if spec.name in states else None for spec in stage.params]
    store.scalars.replace(stage.index, scalars)
