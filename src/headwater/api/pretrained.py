"""Loading and saving of models of any size in Hugging Face's format, one tensor at a time."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor, nn

from headwater.api import huggingface
from headwater.api.files import lazy_tensors
from headwater.api.model_structure import refuse_no_module
from headwater.api.writing import write_tensors
from headwater.convert.shards import (
    INDEX_FILE,
    WEIGHTS_FILE,
    ShardWriter,
    has_weights,
    plan_shards,
    weight_files,
    write_index,
)
from headwater.convert.stored import PICKLED_FILE, pickled_tensors
from headwater.core.cleanup import on_failure
from headwater.core.empty import give_values, record_values, recorded_values
from headwater.core.errors import CheckpointError, ConfigError
from headwater.core.file_memory import FILE_PAGES
from headwater.core.files import disk_errors, lookup_errors, sync_folder
from headwater.core.initialization import initialize, others_without_memory
from headwater.core.lazy import pieces_of
from headwater.core.module_parameters import named_parameters_of
from headwater.core.names import nearest
from headwater.core.safetensors import TensorFile, can_hold
from headwater.core.scratch import scratch_folder
from headwater.core.units import listed, parse_bytes
from headwater.fabric.membership import current

_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_LISTED = 12
"""Maximum number of names in an error."""


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """The result of loading: names that are only in the model, and names that are only in the checkpoint.

    Attributes:
        missing: names in the model that the checkpoint lacks. They keep their values, or get initial values
            if they have no values.
        unexpected: names in the checkpoint that the model lacks.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_pretrained(
    model: nn.Module, directory: str | os.PathLike[str], *, strict: bool = True
) -> LoadReport:
    """Load a checkpoint in Hugging Face's format into a model, one tensor in memory at a time.

    Names are found as in transformers' `from_pretrained`: with or without the base model's prefix, tied
    weights under any of their names, older formats converted. Values are converted to the model's dtypes. A
    model that was built within `empty_parameters()` only records where its values are. When it is compiled
    and called, they are read into the weight store, stage by stage.

    Args:
        model: any module; its weights may be streamed.
        directory: the folder with `model.safetensors`, or with shards and `model.safetensors.index.json`. A
            `pytorch_model.bin` is read too, but code in it is never run.
        strict: raise an error if names are missing or unexpected. If false, missing parameters keep their
            values, or get initial values from the model's own initialisation.

    Returns:
        Missing and unexpected names.

    Raises:
        CheckpointError: if files are missing or damaged, names are missing or unexpected, or shapes differ.
            The error says which, and the model is unchanged.
        ConfigError: if this user may not look up the folder, or `model` is not a module.
    """
    refuse_no_module(model, where="load_pretrained")
    directory = Path(directory)
    loading = _compare(model, directory, strict=strict)
    # Before `assign`: the initialisation may raise an error, and it overwrites all parameters of a module.
    _initialize_rest(model, loading, directory)
    loading.assign()
    return loading.report


def record_pretrained(model: nn.Module, directory: Path, *, strict: bool = True) -> LoadReport:
    """Load a checkpoint as `load_pretrained` does, but do not initialise parameters that it lacks.

    Args:
        model: see `load_pretrained`.
        directory: see `load_pretrained`.
        strict: see `load_pretrained`.

    Returns:
        Missing and unexpected names.

    Raises:
        CheckpointError: see `load_pretrained`.
    """
    loading = _compare(model, directory, strict=strict)
    loading.assign()
    return loading.report


@dataclasses.dataclass(frozen=True)
class _Loading:
    """A checkpoint that was compared with a model and fits it. `assign` loads it.

    Attributes:
        report: the names that are only in the model or only in the checkpoint.
        values: each parameter or buffer of the model that the checkpoint has, with its values there.
    """

    report: LoadReport
    values: Sequence[tuple[Tensor, Tensor]]

    def assign(self) -> None:
        """Copy values to parameters and buffers. Empty parameters only record where their values are."""
        with torch.no_grad():
            for place, values in self.values:
                if place.is_meta and isinstance(place, nn.Parameter):
                    record_values(place, values)
                else:
                    place.copy_(values)  # the store of a streamed parameter keeps the full precision
                    FILE_PAGES.count_written(place.nbytes)


def _compare(model: nn.Module, directory: Path, *, strict: bool) -> _Loading:
    """Compare a checkpoint with a model, without changing the model.

    Raises:
        CheckpointError: see `load_pretrained`.
    """
    _require_buffers(model)
    places = _places(model)
    tensors = _checkpoint_tensors(directory)
    found = huggingface.named_by_model(model, tensors, places)
    _require_shapes(found, places, directory)
    values = _one_of_each(found, places, directory)
    loaded = {id(places[name]) for name in values}
    missing = {name for name, place in places.items() if id(place) not in loaded}
    missing, unexpected = huggingface.without_ignored(model, missing, found.keys() - places.keys())
    report = LoadReport(tuple(sorted(missing)), tuple(sorted(unexpected)))
    if strict and (missing or unexpected):
        raise _names_differ(report, directory)
    # In file order, so that reading ahead works. A converted tensor is a new object and comes last.
    place_in_files = {id(tensor): number for number, tensor in enumerate(tensors.values())}
    order = sorted(values, key=lambda name: place_in_files.get(id(values[name]), len(tensors)))
    return _Loading(report, [(places[name], values[name]) for name in order])


def _require_buffers(model: nn.Module) -> None:
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise CheckpointError(
            f"these buffers of the model are on the meta device and have no values: {listed(empty, _LISTED)}",
            where=type(model).__name__,
            remedy="build the model inside headwater.empty_parameters(), where buffers get values; most "
            "checkpoints do not contain buffers",
        )


def _places(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer by each of its names in `state_dict`."""
    # Not from `state_dict()`: its tensors are new objects, which do not show what is tied.
    places: dict[str, Tensor] = dict(named_parameters_of(model, remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                places[f"{prefix}.{name}" if prefix else name] = buffer
    return places


def _checkpoint_tensors(directory: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint by name, in file order, lazy or mapped into memory."""
    tensors: dict[str, Tensor] = {}
    with lookup_errors():
        if has_weights(directory, PICKLED_FILE) and not has_weights(directory):
            for path in weight_files(directory, PICKLED_FILE):
                tensors |= pickled_tensors(path)
        else:
            for path in weight_files(directory):
                tensors |= lazy_tensors(TensorFile(path, hold=True))
    return tensors


def _require_shapes(found: Mapping[str, Tensor], places: Mapping[str, Tensor], directory: Path) -> None:
    lines = [
        f"{name} has shape {list(tensor.shape)}, the model's has {list(places[name].shape)}"
        for name, tensor in found.items()
        if name in places and tensor.shape != places[name].shape
    ]
    if lines:
        raise CheckpointError(
            f"the checkpoint is of another architecture: {listed(lines, _LISTED, '; ')}",
            where=str(directory),
            remedy="build the model from the checkpoint's own config.json",
        )


def _one_of_each(
    found: Mapping[str, Tensor], places: Mapping[str, Tensor], directory: Path
) -> dict[str, Tensor]:
    """Return one checkpoint tensor per parameter or buffer, even if it has several names.

    Raises:
        CheckpointError: if the checkpoint has different values for names that are one weight in the model.
    """
    name_of: dict[int, str] = {}
    for name in (name for name in found if name in places):
        first = name_of.setdefault(id(places[name]), name)
        if first != name and not _equal(found[first], found[name]):
            raise CheckpointError(
                f"{first} and {name} are one tied weight in the model, but differ in the checkpoint",
                where=str(directory),
                remedy="build the model again with tie_word_embeddings=False in its config",
            )
    return {name: found[name] for name in name_of.values()}


def _equal(first: Tensor, second: Tensor) -> bool:
    pairs = zip_longest(pieces_of(first), pieces_of(second))
    return first.dtype == second.dtype and all(torch.equal(one, other) for one, other in pairs)


def _initialize_rest(model: nn.Module, loading: _Loading, directory: Path) -> None:
    """Set initial values of empty parameters that are in neither this checkpoint nor an earlier one.

    All other parameters keep their values.

    Raises:
        CheckpointError: if the model does not initialise one of these parameters. Then all are emptied again.
    """
    filled = {id(place) for place, _ in loading.values}
    rest = {
        name: param
        for name, param in named_parameters_of(model)
        if param.is_meta and recorded_values(param) is None and id(param) not in filled
    }
    if not rest:
        return
    with on_failure(lambda: _empty(rest.values())), others_without_memory(model, rest):
        for param in rest.values():
            # A parameter that is still NaN afterwards was not initialised; see `_require_values`.
            give_values(param, torch.full_like(param, float("nan"), device="cpu"))
        initialize(model, rest)
        _require_values(rest, directory)


def _empty(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        give_values(param, torch.empty_like(param, device="meta"))


def _require_values(params: Mapping[str, nn.Parameter], directory: Path) -> None:
    """Raise an error if a parameter is still NaN: it was filled with NaN, and no initialisation set it."""
    untouched = [name for name, param in params.items() if param.isnan().any()]
    if untouched:
        raise CheckpointError(
            f"{listed(untouched, _LISTED)}: neither the checkpoint nor the model's initialization has values",
            where=str(directory),
            remedy="build the model outside of headwater.empty_parameters(), or load a checkpoint with them",
        )


def _names_differ(report: LoadReport, directory: Path) -> CheckpointError:
    parts = []
    if report.missing:
        parts.append(
            f"the checkpoint lacks {listed(_with_nearest(report.missing, report.unexpected), _LISTED)}"
        )
    if report.unexpected:
        parts.append(f"the model has no {listed(report.unexpected, _LISTED)}")
    return CheckpointError(
        "; ".join(parts),
        where=str(directory),
        remedy="build the model from the checkpoint's config.json; or pass strict=False: missing parameters "
        "then keep their initial values, and unexpected tensors are not loaded",
    )


def _with_nearest(names: Iterable[str], candidates: Iterable[str]) -> list[str]:
    candidates = list(candidates)
    lines = []
    for name in names:
        near = nearest(name, candidates)
        lines.append(f"{name} (similar there: {near})" if near else name)
    return lines


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    dtype: torch.dtype | None = None,
) -> None:
    """Write a model in Hugging Face's format, in pieces: streamed weights are never whole in memory.

    The files are those of transformers' `save_pretrained`: names, shards, index, `config.json`. They replace
    an earlier save in the directory after all of them are complete. If the process is killed while shards of
    the same names are replaced, the directory has no index, and nothing loads it: save again. With several
    ranks, rank 0 writes the files, and all ranks wait.

    Args:
        model: any module; its weights may be streamed. Only a transformers model has a `config.json`.
        directory: created if it is missing.
        max_shard_size: maximum bytes of a file, a number or a string such as `"5GB"`.
        dtype: dtype of floating-point weights in the files; the dtype in the model if not given.

    Raises:
        CheckpointError: if a weight has no values, or safetensors cannot hold it.
        ConfigError: if `dtype` is not a floating-point dtype, or `max_shard_size` not a size.
        DiskFullError: if the disk is full; the files of an earlier save stay.
    """
    refuse_no_module(model, where="save_pretrained")
    size = parse_bytes(max_shard_size)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(
            f"expected dtype to be a floating-point dtype of torch, got {dtype!r}",
            where="save_pretrained",
            remedy="write for example dtype=torch.bfloat16",
        )
    current().agree(lambda: _save(model, Path(directory), size, dtype), None, "a model to be saved")


def _save(model: nn.Module, directory: Path, max_shard_bytes: int, dtype: torch.dtype | None) -> None:
    tensors = huggingface.named_by_checkpoint(model, _tensors_to_save(model))
    layout = {name: (_saved_dtype(t.dtype, dtype), tuple(t.shape)) for name, t in tensors.items()}
    shards = plan_shards(layout, max_shard_bytes)
    with disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with disk_errors(directory), scratch_folder(directory, ".saving-") as unfinished:
        with ShardWriter(unfinished, shards) as writer:
            write_tensors(tensors, writer.files)
        write_index(unfinished, shards)
        floating = (kind[0] for kind in layout.values() if kind[0].is_floating_point)
        huggingface.save_config(model, unfinished, next(floating, torch.get_default_dtype()))
        _replace_files(unfinished, directory)


def _tensors_to_save(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint holds, by the model's names; streamed ones are lazy."""
    places = _places(model)
    groups: dict[int, list[str]] = {}
    for name, place in places.items():
        groups.setdefault(id(place), []).append(name)
    state: dict[str, Tensor] = model.state_dict()
    tensors = {}
    for name in huggingface.names_to_save(model, groups.values()):
        place = places[name]
        known = recorded_values(place) if isinstance(place, nn.Parameter) else None
        tensors[name] = tensor = state[name] if known is None else known
        if tensor.is_meta:
            remedy = "load values with load_pretrained before you save"
            raise CheckpointError(f"{name} has no values", remedy=remedy)
        if not can_hold(tensor):
            raise CheckpointError(
                f"safetensors cannot hold {name}, a tensor of {tensor.layout} and {tensor.dtype}",
                remedy="make it a dense tensor of a common dtype, or a buffer with persistent=False",
            )
    return tensors


def _saved_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


def _replace_files(unfinished: Path, directory: Path) -> None:
    """Move complete files into `directory`, and remove all other weight files of an earlier save."""
    new = {path.name for path in unfinished.iterdir()}
    old = list(directory.iterdir())
    if any(_SHARD.fullmatch(path.name) and path.name in new for path in old):
        # A crash must not leave shards of two saves under one index. Without an index nothing loads them.
        (directory / INDEX_FILE).unlink(missing_ok=True)
        sync_folder(directory)
    # In sorted order the index follows the shards that it names.
    for name in sorted(new):
        (unfinished / name).replace(directory / name)
    sync_folder(directory)
    # Old files are removed last: a crash before this must not leave a folder without weights.
    for path in old:
        is_weights = path.name in (WEIGHTS_FILE, INDEX_FILE) or _SHARD.fullmatch(path.name)
        if is_weights and path.name not in new:
            path.unlink()
