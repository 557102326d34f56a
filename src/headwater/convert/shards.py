"""Safetensors checkpoints in shards: written one tensor at a time, read lazily."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headwater.core.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPE_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclasses.dataclass(frozen=True)
class Shard:
    """One safetensors file before anything is written.

    Attributes:
        file: its name.
        shapes: shape of each tensor in it, in file order.
    """

    file: str
    shapes: dict[str, tuple[int, ...]]


def plan_shards(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_shard_bytes: int
) -> list[Shard]:
    """Cut tensors, in order, into files of up to `max_shard_bytes`; a larger tensor has one of its own."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    used = 0
    for name, shape in shapes.items():
        size = _size_bytes(shape, dtype)
        if groups[-1] and used + size > max_shard_bytes:
            groups.append({})
            used = 0
        groups[-1][name] = shape
        used += size
    if len(groups) == 1:
        return [Shard(WEIGHTS_FILE, groups[0])]
    return [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", group)
        for number, group in enumerate(groups, start=1)
    ]


def weight_index(shards: list[Shard], dtype: torch.dtype) -> dict[str, object]:
    """The index file's content: which shard holds which tensor."""
    total = sum(_size_bytes(shape, dtype) for shard in shards for shape in shard.shapes.values())
    places = {name: shard.file for shard in shards for name in shard.shapes}
    return {"metadata": {"total_size": total}, "weight_map": places}


class ShardWriter:
    """Writes the tensors of planned shards in any order, holding none of them.

    The format, from its documentation: the header's length (8 bytes, little-endian), the header (JSON:
    dtype, shape and byte range of each tensor), then the tensors' bytes without gaps.

    Args:
        folder: where the files are made.
        shards: what goes where.
        dtype: dtype in the files.
    """

    def __init__(self, folder: Path, shards: list[Shard], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._files: list[BinaryIO] = []
        self._places: dict[str, tuple[BinaryIO, int, tuple[int, ...]]] = {}
        for shard in shards:
            file = (folder / shard.file).open("wb")
            self._files.append(file)
            self._lay_out(file, shard)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor at its place."""
        file, offset, shape = self._places[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"tensor {name} has shape {tuple(tensor.shape)}, the model's config says {shape}",
                where=file.name,
                remedy="check that the model's config belongs to the checkpoint",
            )
        flat = tensor.detach().to("cpu", self._dtype).contiguous().view(-1)
        file.seek(offset)
        file.write(flat.view(torch.uint8).numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()

    def _lay_out(self, file: BinaryIO, shard: Shard) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        starts, position = {}, 0
        for name, shape in shard.shapes.items():
            starts[name], end = position, position + _size_bytes(shape, self._dtype)
            header[name] = {
                "dtype": _DTYPE_CODES[self._dtype],
                "shape": list(shape),
                "data_offsets": [position, end],
            }
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data starts on a multiple of 8 bytes
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shard.shapes.items():
            self._places[name] = (file, 8 + len(text) + starts[name], shape)


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint, one at a time, shard by shard.

    Raises:
        CheckpointError: if a file is missing or is not a safetensors file.
    """
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"cannot read weights: {error}", where=str(path), remedy="copy the file again"
            ) from error


def _weight_files(folder: Path) -> Iterable[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        places: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return [folder / file for file in dict.fromkeys(places.values())]
    single = folder / WEIGHTS_FILE
    if single.is_file():
        return [single]
    raise CheckpointError(
        f"the folder holds neither {WEIGHTS_FILE} nor {INDEX_FILE}",
        where=str(folder),
        remedy="save the checkpoint with safetensors; pickled weights are not read",
    )


def _size_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize
