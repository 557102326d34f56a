"""Comparison of two checkpoints by the names and values of their tensors, in any formats."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from headwater.config.models.huggingface import CONFIG_FILE
from headwater.convert.checkpoint import open_hf, read_config
from headwater.convert.folder import MODEL_FILE, read_model_section
from headwater.convert.model_zoo import zoo_tensors
from headwater.convert.shards import has_weights
from headwater.convert.stored import PICKLED_FILE, in_file, stored_tensors
from headwater.core.errors import ConfigError
from headwater.core.file_tensor import FileTensor
from headwater.core.mdl import is_mdl
from headwater.store.snapshot_load import SavedCheckpoint
from headwater.store.snapshot_manifest import MANIFEST_FILE

Read = Callable[[], Tensor]
"""Function that reads the values of a tensor."""

_LIBRARY = "hf."
"""Prefix of parameter names in a run of a model of the transformers library."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """A tensor that differs between two checkpoints.

    Attributes:
        name: of the tensor.
        what: how it differs.
    """

    name: str
    what: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of a comparison of two checkpoints.

    Attributes:
        equal: tensors with equal values, in the same dtype or in another one.
        other_dtype: how many of these have another dtype in the second checkpoint.
        differences: the tensors that differ.
        counts: how many of them differ in shape or values, and how many only one checkpoint has.
    """

    equal: int
    other_dtype: int
    differences: tuple[Difference, ...]
    counts: Mapping[str, int]

    @property
    def summary(self) -> str:
        """The counts in one line."""
        others = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        converted = f" ({self.other_dtype} in another dtype)" if self.other_dtype else ""
        exact = not self.differences and not self.other_dtype
        same = "; the checkpoints are the same, bit for bit" if exact else ""
        return f"{self.equal} equal{converted}, {others}{same}"


def compare(first: Path, second: Path) -> Comparison:
    """Compare two checkpoints. One tensor of each is in memory at a time.

    If only one of them is in Hugging Face's format, its tensors get the names of this package.

    Args:
        first: folder of checkpoint A.
        second: folder of checkpoint B.

    Raises:
        CheckpointError: if one of them cannot be read.
    """
    ours, others = _both(first, second)
    differences, equal, other_dtype = [], 0, 0
    counts = {"differ": 0, "only in A": 0, "only in B": 0}
    for name, read in ours.items():
        if name not in others:
            counts["only in A"] += 1
            differences.append(Difference(name, f"only in {first}"))
            continue
        tensor, other = read(), others[name]()
        what = _difference(tensor, other)
        if what is None:
            equal += 1
            other_dtype += tensor.dtype != other.dtype
        else:
            counts["differ"] += 1
            differences.append(Difference(name, what))
    for name in others:
        if name not in ours:
            counts["only in B"] += 1
            differences.append(Difference(name, f"only in {second}"))
    return Comparison(equal, other_dtype, tuple(differences), counts)


def _difference(tensor: Tensor, other: Tensor) -> str | None:
    """Describe how two tensors differ; return `None` if they are equal.

    Tensors of one dtype are equal if their bits are. A different dtype alone is not a difference: conversions
    change it.
    """
    if other.shape != tensor.shape:
        return f"shapes {list(tensor.shape)} and {list(other.shape)}"
    # Bits are compared instead of values, because NaN is not equal to itself, and 0 is equal to -0.
    if tensor.dtype == other.dtype and torch.equal(_bits(tensor), _bits(other)):
        return None
    wide, other_wide = _wide(tensor), _wide(other)
    same = (wide == other_wide) | (wide.isnan() & other_wide.isnan())
    if not bool(same.all()):
        return f"values, by up to {(wide - other_wide)[~same].abs().max().item():.3g}"
    return "the signs of zeros, or the bits of NaN" if tensor.dtype == other.dtype else None


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in the widest dtype of its kind."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def _both(first: Path, second: Path) -> tuple[dict[str, Read], dict[str, Read]]:
    """Return the tensors of both checkpoints, under names that are the same for the same weight."""
    pair = [_stored(path) for path in (first, second)]
    foreign = [_is_library_folder(path) for path in (first, second)]
    if foreign[0] != foreign[1]:
        index = foreign.index(True)
        path = (first, second)[index]
        # A run of a library model has the library's names behind a prefix; other runs need a conversion.
        if not all(name.startswith(_LIBRARY) for name in pair[1 - index]):
            converted = _by_our_names(path)
            pair[index] = pair[index] if converted is None else converted
        else:
            pair[1 - index] = {name.removeprefix(_LIBRARY): read for name, read in pair[1 - index].items()}
    return pair[0], pair[1]


def _is_library_folder(path: Path) -> bool:
    """True if a folder is in Hugging Face's format."""
    return (
        not (path / MANIFEST_FILE).is_file()
        and not (path / MODEL_FILE).is_file()
        and (path / CONFIG_FILE).is_file()
    )


def is_folder_of_weights(path: Path) -> bool:
    """True if a folder holds weights without a run, in Hugging Face's format or converted from it."""
    if (path / MANIFEST_FILE).is_file():
        return False
    return has_weights(path) or has_weights(path, PICKLED_FILE)


def model_of(path: Path) -> str:
    """Return the name of the model of a folder of weights, from its own files; `-` if they lack it.

    Raises:
        ConfigError: if these files are damaged.
    """
    if (path / MODEL_FILE).is_file():
        return read_model_section(path / MODEL_FILE).name
    if not (path / CONFIG_FILE).is_file():
        return "-"
    config = read_config(path)
    named = config.get("architectures")
    return str(named[0] if isinstance(named, list) and named else config.get("model_type", "-"))


def _stored(path: Path) -> dict[str, Read]:
    """Return name -> function that reads the tensor, for each tensor of a checkpoint."""
    return {stored.name: stored.read for stored in tensors_of(path)}


def tensors_of(path: Path) -> list[FileTensor]:
    """Return the tensors of a checkpoint in any format. Their values are read on request.

    Raises:
        CheckpointError: if the checkpoint is missing or damaged.
    """
    if (path / MANIFEST_FILE).is_file():
        return [stored for file in SavedCheckpoint(path).weights() for stored in in_file(file)]
    return list(zoo_tensors(path) if is_mdl(path) else stored_tensors(path))


def _by_our_names(folder: Path) -> dict[str, Read] | None:
    """Return a Hugging Face folder's tensors by this package's names; `None` without a converter."""
    # Without a converter the names are compared as they are, which is still an answer.
    try:
        return open_hf(folder).stored()
    except ConfigError:
        return None
