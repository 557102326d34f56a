"""Checkpoints of a run: writing during training, finding, deleting; and the lock of the run's folder."""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import itertools
import json
import logging
import math
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import safetensors.torch
import torch
from torch import nn

from headwater.core.cleanup import on_failure
from headwater.core.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    HeadwaterError,
    ModelDirBusyError,
    StoreError,
)
from headwater.core.files import check_place, disk_errors, is_damage, make_folder
from headwater.core.stage import ParamSpec, StageSpec
from headwater.store.checkpoint_files import write_first
from headwater.store.checkpoint_folder import recover, retire
from headwater.store.rules import UpdateRules
from headwater.store.saved_weights import Buffers, Names
from headwater.store.snapshot import Snapshot
from headwater.store.snapshot_hosts import SnapshotElsewhere
from headwater.store.snapshot_load import SavedCheckpoint, load_weights, match_weights
from headwater.store.snapshot_manifest import MANIFEST_FILE
from headwater.store.store import WeightStore

logger = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint_(\d+)")
_STATE_FILE = "trainer.json"
_STATE_TENSORS_FILE = "trainer.safetensors"
_TENSOR_KEY = "__tensor__"
_OTHER_COPY = "use another checkpoint, or another copy of this one"
_LOCK_FILE = "run.lock"
_SET_ASIDE_SUFFIX = ".superseded"


class CheckpointManager:
    """Writes and reads the folders `checkpoint_<step>` in a model_dir.

    Reading needs the folder only. Before `save` the caller must hold the folder's `ModelDirLock`.

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
            DiskFullError: if there is too little space for this checkpoint or for the one before. Complete
                checkpoints stay.
            HeadwaterError: if the one before failed in any other way.
        """
        self.wait()
        folder = self._folder(step)
        # In this thread: the snapshot is of the weights before the next step changes them.
        snapshot = Snapshot(store, folder, step, buffers=buffers, extras=_pack_state(state))
        self._damaged.pop(folder, None)  # replaced by this one
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
        folder = self._folder(0)
        write_first(folder, stages, rule, read, extras=_pack_state(state))
        return folder

    def save_elsewhere(self, store: WeightStore) -> None:
        """Write this rank's part of a checkpoint that rank 0 begins to `save`.

        Args:
            store: of this rank; it stays open until `wait`.

        Raises:
            RankError: if its part of the checkpoint before failed.
        """
        self.wait()
        self._writing = self._thread.submit(SnapshotElsewhere(store).run)

    def _folder(self, step: int) -> Path:
        return self.model_dir / f"checkpoint_{step}"

    def _finish(self, snapshot: Snapshot) -> None:
        newest = snapshot.run()
        # After `run`: older checkpoints stay until the new one is complete.
        if self._keep_n is not None:
            others = [path for path in complete_checkpoints(self.model_dir) if path != newest]
            for path in others[: max(len(others) - (self._keep_n - 1), 0)]:
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
        # Forgotten first, so that an error is raised only once.
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
                # Passing over an intact checkpoint would discard the steps since the one before it.
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
                remedy="restore a copy of one, or start over with --autoload_last_checkpoint=false",
            ) from newest
        return None

    def skip(self, path: Path, damage: HeadwaterError) -> None:
        """Log a warning about a damaged checkpoint, which `newest_whole` skips from now on.

        Args:
            path: the checkpoint.
            damage: describes the damage.
        """
        # Frames of the traceback hold the engine that was loading.
        self._damaged[path] = damage.with_traceback(None)
        logger.warning("%s is damaged and skipped: %s", path, damage.what)

    def is_own(self, path: Path) -> bool:
        """True if `path` is named like a checkpoint of this run and is in its model_dir."""
        named = _NAME.fullmatch(path.name) is not None
        return named and path.parent.resolve() == self.model_dir.resolve()

    def set_aside(self, step: int, start: Path | None) -> list[Path]:
        """Rename checkpoints of later steps than `step`, at which a run starts: it will compute them again.

        Otherwise they would be the newest ones, and the next run would continue from them.

        Args:
            step: steps done.
            start: the checkpoint that the run starts from; it stays.

        Returns:
            Their new names.
        """
        kept = start and start.resolve()
        later = [path for path in complete_checkpoints(self.model_dir) if step_of(path) >= step]
        with disk_errors(self.model_dir):
            return [path.rename(_unused(path)) for path in later if path.resolve() != kept]

    def load(
        self,
        store: WeightStore,
        path: Path,
        *,
        weights_only: bool = False,
        strict: bool = True,
        buffers: Buffers | None = None,
        names: Names = lambda name: (name,),
    ) -> tuple[int, dict[str, Any]]:
        """Load a checkpoint into a store.

        Args:
            store: gets the weights and the optimizer state.
            path: the checkpoint.
            weights_only: load no optimizer state.
            strict: require that the checkpoint has every parameter and no other; otherwise a parameter that
                it lacks keeps its value.
            buffers: the model's persistent buffers, overwritten in place.
            names: names that a parameter may have in the checkpoint, if only the weights are loaded.

        Returns:
            Its step, and the state that was given to `save`.

        Raises:
            CheckpointError: if it is missing, not complete, or of another model or optimizer.
            CorruptError: if bytes are damaged. The store must be filled again then before it is used.
        """
        self.wait()
        saved = SavedCheckpoint(path)
        if weights_only:
            load_weights(store, path, buffers, strict=strict, names=names)
        else:
            saved.restore(store, buffers, strict=strict)
        return saved.manifest.step, _unpack_state(saved)

    def check_model(
        self,
        stages: Sequence[StageSpec],
        path: Path,
        *,
        weights_only: bool,
        strict: bool,
        buffers: Buffers,
        names: Names,
    ) -> None:
        """Raise if a checkpoint is not of a model. Reads no values, so it takes no time.

        Args:
            stages: of the model.
            path: the checkpoint.
            weights_only: see `load`.
            strict: see `load`.
            buffers: the model's persistent buffers.
            names: see `load`.

        Raises:
            CheckpointError: if names, shapes or dtypes differ.
            CorruptError: if the header of a file is damaged.
        """
        if weights_only:
            match_weights(stages, path, buffers, strict=strict, names=names)
        else:
            SavedCheckpoint(path).match(stages, buffers, strict=strict)


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
        state=_unpack_state(saved),
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
    if _NAME.fullmatch(path.name) and saved.manifest.step != step_of(path):
        return CorruptError(
            f"the folder is named {path.name}, but its manifest says step {saved.manifest.step}",
            where=str(path),
            remedy="rename the folder to its original name",
        )
    try:
        _unpack_state(saved)
        if deep:
            saved.verify()
        else:
            saved.check_files()
    except (CheckpointError, StoreError) as error:
        return error
    return None


def complete_checkpoints(model_dir: Path) -> list[Path]:
    """Return every complete checkpoint in a model_dir, by step."""
    folders = [path.parent for path in model_dir.glob(f"checkpoint_*/{MANIFEST_FILE}")]
    # Longer names are those of checkpoints that are incomplete or were set aside.
    return sorted((path for path in folders if _NAME.fullmatch(path.name)), key=step_of)


def _unused(path: Path) -> Path:
    """Return a path that does not exist, and whose name is not that of a checkpoint."""
    names = itertools.chain([_SET_ASIDE_SUFFIX], (f"{_SET_ASIDE_SUFFIX}{n}" for n in itertools.count(2)))
    candidates = (path.with_name(path.name + name) for name in names)
    return next(candidate for candidate in candidates if not candidate.exists())


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, f"{path.name} is not the name of a checkpoint"
    return int(match[1])


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> buffer for the persistent buffers of a model. A shared buffer is listed once."""
    return {name: buffer for name, buffer in model.named_buffers() if not _is_transient(model, name)}


def _is_transient(model: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf in model.get_submodule(path)._non_persistent_buffers_set


def _pack_state(state: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of the run's state: the tree as JSON, and the tensors in it."""
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(_split(state, "state", tensors), indent=1).encode()
    return {_STATE_FILE: tree, _STATE_TENSORS_FILE: safetensors.torch.save(tensors)}


def _split(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return `value` with its tensors replaced by their names, and move the tensors to `tensors`."""
    match value:
        case torch.Tensor():
            # safetensors refuses tensors that share memory or are not contiguous.
            tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            return {_TENSOR_KEY: name}
        case Mapping():
            assert all(isinstance(key, str) for key in value), f"{name} has keys that are not strings"
            return {key: _split(entry, f"{name}/{key}", tensors) for key, entry in value.items()}
        case list():
            return [_split(entry, f"{name}/{index}", tensors) for index, entry in enumerate(value)]
    assert value is None or isinstance(value, bool | int | float | str), f"{name} is a {type(value).__name__}"
    return value


def _unpack_state(saved: SavedCheckpoint) -> dict[str, Any]:
    """Return the state that `_pack_state` wrote.

    Raises:
        CheckpointError: if a file is missing.
        CorruptError: if a file is damaged, or does not hold a state.
    """
    path = saved.folder / _STATE_FILE
    try:
        tensors = safetensors.torch.load(saved.read(_STATE_TENSORS_FILE))

        def join(entry: dict[str, Any]) -> Any:
            return tensors[entry[_TENSOR_KEY]] if _TENSOR_KEY in entry else entry

        state = json.loads(saved.read(_STATE_FILE), object_hook=join)
    except (ValueError, KeyError, TypeError, RecursionError, safetensors.SafetensorError) as error:
        what = f"the state of the run cannot be read: {error!r}"
        raise CorruptError(what, where=str(path), remedy=_OTHER_COPY) from error
    if not isinstance(state, dict):
        what = f"expected the state of the run to be a mapping, found a {type(state).__name__}"
        raise CorruptError(what, where=str(path), remedy=_OTHER_COPY)
    return state


class ModelDirLock:
    """A lock that keeps other runs out of a model_dir. The system releases it when the process ends.

    Entering it deletes incomplete files that a killed run left.

    Args:
        model_dir: the folder; created if missing.

    Raises:
        ModelDirBusyError: on entering, if another run holds the lock. The message names its process.
        RunError: on entering, if the folder or its lock cannot be written.
    """

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._path = model_dir / _LOCK_FILE
        self._fd = -1

    def __enter__(self) -> Self:
        check_place(self._model_dir, expected="a folder")
        check_place(self._path, expected="a file")
        with disk_errors(self._path):
            make_folder(self._model_dir)
            # Not truncated: the file names the run that holds the lock.
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        # Also if the disk is full: a process that lives on would hold the lock until its end.
        with on_failure(lambda: os.close(self._fd)):
            self._take()
            recover(self._model_dir)
        return self

    def _take(self) -> None:
        """Lock the file, and write the name of this process into it."""
        with disk_errors(self._path):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.read(self._fd, 1000).decode(errors="replace")
                raise ModelDirBusyError(
                    f"another run works in this model_dir: {holder or 'it has just begun'}",
                    where=str(self._model_dir),
                    remedy="wait for it, stop it, or name another model_dir",
                ) from error
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, _this_process().encode(), 0)

    def __exit__(self, *exception: object) -> None:
        # The file stays: if it were removed, a run that has opened it would lock a file without a name.
        os.close(self._fd)


def _this_process() -> str:
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return f"process {os.getpid()} on {socket.gethostname()}, since {now}"
