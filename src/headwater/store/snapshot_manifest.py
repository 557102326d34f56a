"""The manifest of a checkpoint. It is written last, so that only a complete checkpoint has one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from headwater.core.checked_files import OTHER_COPY, Chunk, json_checksum
from headwater.core.errors import CheckpointError, CorruptError
from headwater.core.files import disk_errors, why_unreadable
from headwater.core.safetensors import DTYPE_CODES, DTYPES
from headwater.core.stage import ParamSpec
from headwater.store.layout import Scalars
from headwater.store.rules import UpdateRules

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1

BUFFERS_FILE = "weights_buffers.safetensors"
"""Name of the file with the model's buffers. Together with the weights files it has the whole model."""


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """The dtype, as safetensors names it, and the shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ParamEntry:
    """A parameter as it was saved.

    Attributes:
        name: qualified name.
        dtype: the dtype of its master.
        shape: its shape.
        states: optimizer state tensors, by name.
        scalars: its optimizer scalars; `None` if it was never updated.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    states: dict[str, TensorEntry]
    scalars: dict[str, Any] | None


@dataclasses.dataclass(frozen=True)
class StageEntry:
    """A stage as it was saved."""

    name: str
    weights_file: str
    optimizer_file: str
    params: list[ParamEntry]


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """The size and checksums of a file. The checksums are of chunks that cover the whole file, in order."""

    num_bytes: int
    chunks: list[Chunk]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a manifest file: the checkpoint's parameters, and its files with their checksums.

    Attributes:
        step: training steps before it.
        optimizer: class name of the optimizer.
        stages: its parameters, by stage.
        files: every file but the manifest itself, by name.
    """

    step: int
    optimizer: str
    stages: list[StageEntry]
    files: dict[str, FileEntry]

    @property
    def params(self) -> dict[str, ParamEntry]:
        """Name -> every parameter of the checkpoint."""
        return {param.name: param for stage in self.stages for param in stage.params}

    @property
    def num_bytes(self) -> int:
        """The bytes of all files together, without the manifest."""
        return sum(file.num_bytes for file in self.files.values())

    def to_json(self) -> bytes:
        """Return the content of the manifest file; the inverse of `read_manifest`."""
        content = dataclasses.asdict(self)
        document = {
            "format_version": FORMAT_VERSION,
            "checksum": json_checksum(content),
            "content": content,
        }
        return json.dumps(document).encode()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in `folder`.

    Raises:
        CheckpointError: if it is missing, or a newer version wrote it.
        CorruptError: if it is damaged.
    """
    path = folder / MANIFEST_FILE
    if path.exists() and not path.is_file():
        raise _damaged(path, "it is not a file")
    if not path.is_file():
        raise CheckpointError(
            f"the folder is not a complete checkpoint: it has no {MANIFEST_FILE}",
            where=str(folder),
            remedy="name a folder checkpoint_<step> of a run; one that ends in .partial was interrupted",
        )
    try:
        with disk_errors(path):
            document = json.loads(path.read_bytes())
        version, checksum, content = (document[key] for key in ("format_version", "checksum", "content"))
        actual = json_checksum(content)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(path, why_unreadable(error)) from error
    if type(version) is not int or version < 1:
        raise _damaged(path, f"its format version is {version!r}")
    # The version is checked before the checksum: a newer version may compute the checksum differently.
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"the checkpoint has format version {version}, but this version of headwater reads only versions "
            f"up to {FORMAT_VERSION}",
            where=str(path),
            remedy="install the version of headwater that wrote it, or a newer one",
        )
    if actual != checksum:
        raise _damaged(path, "its checksum does not match")
    return _parse_content(path, content)


def _parse_content(path: Path, content: object) -> Manifest:
    try:
        manifest = TypeAdapter(Manifest).validate_python(content)
    except ValidationError as error:
        raise _damaged(path, str(error)) from error
    named = [*manifest.files, *(f for s in manifest.stages for f in (s.weights_file, s.optimizer_file))]
    if any(Path(name).name != name or name not in manifest.files for name in named):
        raise _damaged(path, "it names files that are not the checkpoint's own")
    if not all(_covers(file) for file in manifest.files.values()):
        raise _damaged(path, "its checksums do not cover its files")
    return manifest


def _covers(file: FileEntry) -> bool:
    position = 0
    for offset, length, _ in file.chunks:
        if offset != position:
            return False
        position += length
    return position == file.num_bytes


def _damaged(path: Path, why: str) -> CorruptError:
    return CorruptError(
        f"the manifest is damaged: {why}",
        where=str(path),
        remedy=OTHER_COPY,
    )


def encode_scalars(scalars: Scalars | None) -> dict[str, Any] | None:
    """Return optimizer scalars as exact JSON values: numbers as they are, tensors with their dtype."""
    return None if scalars is None else {name: _encode(name, value) for name, value in scalars.items()}


def _encode(name: str, value: object) -> object:
    if isinstance(value, torch.Tensor):
        assert value.dim() == 0, f"optimizer state {name} of shape {tuple(value.shape)} is not a scalar"
        return {"dtype": DTYPE_CODES[value.dtype], "value": value.item()}
    assert value is None or isinstance(value, bool | int | float | str), f"{name} is a {type(value).__name__}"
    return value


def decode_scalars(scalars: Mapping[str, Any] | None) -> Scalars | None:
    """Return optimizer scalars from JSON values; the inverse of `encode_scalars`.

    Raises:
        KeyError, TypeError, ValueError: if the values were not written by `encode_scalars`.
    """
    if scalars is None:
        return None
    return {
        name: torch.tensor(value["value"], dtype=DTYPES[value["dtype"]], device="cpu")
        if isinstance(value, dict)
        else value
        for name, value in scalars.items()
    }


def state_entries(rule: UpdateRules, param: ParamSpec) -> dict[str, TensorEntry]:
    """Return name -> dtype and shape of each optimizer state tensor of a parameter."""
    return {
        name: TensorEntry(DTYPE_CODES[state.dtype], state.shape_for(param))
        for name, state in rule.state_layout(param).items()
    }


def state_name(param: str, state: str) -> str:
    """Return the name of an optimizer state tensor in its file."""
    return f"{param}/{state}"
