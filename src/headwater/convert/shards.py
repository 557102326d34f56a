"""Sharded safetensors checkpoints, written and read one tensor at a time."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from headwater.core.errors import CheckpointError
from headwater.core.files import kind_of
from headwater.core.safetensors import Layout, TensorFile, TensorFileWriter, TensorKind, indexed_files

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
"""Maximum size of a weight file, if the user sets no other."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Plan of a safetensors file: its name, and the dtype and shape of each tensor.

    Attributes:
        file: name of the file.
        tensors: dtype and shape of each tensor in it.
    """

    file: str
    tensors: Layout


def plan_shards(tensors: Layout, max_shard_bytes: int) -> list[Shard]:
    """Distribute tensors, in order, over files of at most `max_shard_bytes`. A larger one gets its own file.

    The result is the same as in the transformers library.
    """
    groups: list[Layout] = []
    group: dict[str, TensorKind] = {}
    used = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        if size > max_shard_bytes:
            groups.append({name: (dtype, shape)})
            continue
        if used + size > max_shard_bytes:
            groups.append(group)
            group, used = {}, 0
        group[name] = (dtype, shape)
        used += size
    if group or not groups:
        groups.append(group)
    if len(groups) == 1:
        return [Shard(WEIGHTS_FILE, groups[0])]
    return [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, start=1)
    ]


def write_index(folder: Path, shards: list[Shard]) -> None:
    """Write the index of a sharded checkpoint: the file of each tensor. A single shard needs no index."""
    if len(shards) == 1:
        return
    tensors = [tensor for shard in shards for tensor in shard.tensors.values()]
    metadata = {
        "total_parameters": sum(math.prod(shape) for _, shape in tensors),
        "total_size": sum(math.prod(shape) * dtype.itemsize for dtype, shape in tensors),
    }
    places = {name: shard.file for shard in shards for name in shard.tensors}
    text = json.dumps({"metadata": metadata, "weight_map": places}, indent=2, sort_keys=True)
    (folder / INDEX_FILE).write_text(f"{text}\n")


class ShardWriter:
    """A writer of the planned files: it writes each tensor at once, in whatever order they come.

    Attributes:
        files: the file of each tensor, by the tensor's name.

    Args:
        folder: folder of the files.
        shards: planned files.

    Raises:
        DiskFullError: if the disk is full.
    """

    def __init__(self, folder: Path, shards: list[Shard]) -> None:
        self._tensors = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
        # Without checksums: nothing in this format would hold them.
        self._files = {
            shard.file: TensorFileWriter(folder / shard.file, shard.tensors, checksums=False)
            for shard in shards
        }
        self.files = {name: self._files[shard.file] for shard in shards for name in shard.tensors}
        self._open = ExitStack()

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor to its planned place, in the planned dtype.

        Raises:
            CheckpointError: if the tensor does not have the planned shape.
        """
        file = self.files[name]
        dtype, shape = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"expected tensor {name} of shape {shape} (model's config), got {tuple(tensor.shape)}",
                where=str(file.path),
                remedy="check that the model's config belongs to the checkpoint",
            )
        file.write(name, 0, tensor.detach().to("cpu", dtype))

    def __enter__(self) -> Self:
        for file in self._files.values():
            self._open.enter_context(file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of every tensor of a checkpoint, shard by shard.

    Raises:
        CheckpointError: if a file is missing or is not a safetensors file.
    """
    for path in weight_files(folder):
        file = TensorFile(path)
        for name in file.places:
            yield name, file.read_whole(name)


def has_weights(folder: Path, single: str = WEIGHTS_FILE) -> bool:
    """True if a folder holds a checkpoint: the file `single`, or the index of its shards."""
    return any((folder / name).is_file() for name in (single, f"{single}.index.json"))


def weight_files(folder: Path, single: str = WEIGHTS_FILE) -> list[Path]:
    """Return the files of a checkpoint in Hugging Face's format: `single`, or the shards in its index.

    Raises:
        CheckpointError: if neither exists, or the index is damaged.
        StoreError: if the system refuses to read the index.
    """
    if (folder / single).is_file():
        return [folder / single]
    index = folder / f"{single}.index.json"
    if not index.is_file():
        found = kind_of(folder)
        raise CheckpointError(
            f"the folder holds neither {single} nor {index.name}"
            if found == "a folder"
            else f"expected a folder of weights, found {found or 'nothing'}",
            where=str(folder),
            remedy="name a folder that save_pretrained has written, with its weights",
        )
    return indexed_files(index)
