"""Safetensors files written and read a run of elements at a time, with a checksum for every chunk.

The format, from its documentation: the header's length (8 bytes, little-endian), the header (JSON: dtype,
shape and byte range of each tensor, counted from the header's end), then the tensors' bytes without gaps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from headwater.core.errors import CheckpointError, CorruptError
from headwater.store.files import disk_errors

CHUNK_BYTES = 4 << 20
"""A checksum covers at most this much, so that reading part of a file verifies little more than that."""

Chunk = tuple[int, int, int]
"""Offset in the file, length, CRC-32."""

DTYPE_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""The format's names of dtypes."""

DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
"""The inverse."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_OTHER_COPY = "use another checkpoint, or another copy of this one"


@dataclasses.dataclass(frozen=True)
class TensorPlace:
    """A tensor in a file; `offset` is in bytes from the file's start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def lay_out(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> tuple[bytes, dict[str, TensorPlace]]:
    """The first bytes of a file for `tensors` (dtype and shape by name), and where each of them will lie."""
    by_alignment = sorted(tensors.items(), key=lambda item: -item[1][0].itemsize)
    places, position = {}, 0
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, (dtype, shape) in by_alignment:
        place = places[name] = TensorPlace(dtype, shape, position)
        end = position + place.num_bytes
        header[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # data starts on a multiple of 8 bytes
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return head, {n: dataclasses.replace(p, offset=p.offset + len(head)) for n, p in places.items()}


class CheckedFile:
    """A file of known size, written in any order while it is entered as a context, on disk when that ends.

    Args:
        path: where it is created; whatever was there is replaced.
        num_bytes: its size; the space is reserved at once.

    Raises:
        DiskFullError: if there is no room.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self._chunks: list[Chunk] = []
        with disk_errors(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                if num_bytes:
                    os.posix_fallocate(self._fd, 0, num_bytes)
            finally:
                os.close(self._fd)

    @property
    def chunks(self) -> list[Chunk]:
        """What was written, in file order."""
        return sorted(self._chunks)

    def __enter__(self) -> Self:
        with disk_errors(self.path):
            self._fd = os.open(self.path, os.O_RDWR)
        return self

    def put(self, offset: int, data: memoryview) -> None:
        """Write bytes at `offset`, once each."""
        with disk_errors(self.path):
            for first in range(0, len(data), CHUNK_BYTES):
                chunk = data[first : first + CHUNK_BYTES]
                done = 0
                while done < len(chunk):
                    done += os.pwrite(self._fd, chunk[done:], offset + first + done)
                self._chunks.append((offset + first, len(chunk), zlib.crc32(chunk)))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with disk_errors(self.path):
            try:
                if kind is None:
                    os.fsync(self._fd)
            finally:
                os.close(self._fd)


class TensorFileWriter(CheckedFile):
    """A safetensors file whose tensors are written in any runs and order.

    Args:
        path: where it is created.
        tensors: dtype and shape of what it will hold, by name.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self._head, self._places = lay_out(tensors)
        super().__init__(path, len(self._head) + sum(place.num_bytes for place in self._places.values()))

    def __enter__(self) -> Self:
        super().__enter__()
        self.put(0, memoryview(self._head))
        return self

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Write a run of elements of tensor `name` that begins with its element `start`."""
        place = self._places[name]
        assert values.dtype == place.dtype, f"{name} is laid out as {place.dtype}, not {values.dtype}"
        self.put(place.offset + start * place.dtype.itemsize, as_bytes(values))


def as_bytes(values: torch.Tensor) -> memoryview:
    """The bytes of a host tensor, without a copy where it is contiguous."""
    return values.detach().reshape(-1).view(torch.uint8).numpy().data


class FileBytes:
    """The bytes of a file that exists, compared with their checksums where there are some.

    Args:
        path: the file.
        chunks: checksums of all its bytes, in file order.

    Raises:
        CheckpointError: if it is missing.
        CorruptError: if it is not as long as it was.
    """

    def __init__(self, path: Path, chunks: Sequence[Chunk] | None = None) -> None:
        if not path.is_file():
            raise CheckpointError("the file is missing", where=str(path), remedy=_OTHER_COPY)
        self.path = path
        self.num_bytes = path.stat().st_size
        self._chunks = chunks
        self._last: tuple[int, bytes] | None = None  # a chunk of which the rest is likely to be wanted next
        written = self.num_bytes if chunks is None else sum(length for _, length, _ in chunks)
        if self.num_bytes != written:
            kind = "truncated" if self.num_bytes < written else "too long"
            raise CorruptError(
                f"the file is {kind}: {self.num_bytes} bytes of {written}",
                where=str(path),
                remedy=_OTHER_COPY,
            )

    def read(self, low: int, count: int, what: str) -> bytes:
        """`count` bytes from offset `low` on; errors call them `what`.

        Raises:
            CorruptError: if they are not those that were written.
        """
        if self._chunks is None:
            return self._read(low, count, what)
        high, parts = low + count, []
        index = bisect_right(self._chunks, low, key=lambda chunk: chunk[0]) - 1
        while index < len(self._chunks) and self._chunks[index][0] < high:
            offset, length, _ = self._chunks[index]
            chunk = self._chunk(index, what)
            parts.append(chunk[max(low - offset, 0) : high - offset])
            self._last = (index, chunk) if high < offset + length else None
            index += 1
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _chunk(self, index: int, what: str) -> bytes:
        assert self._chunks is not None, "only a file with checksums has chunks"
        if self._last is not None and self._last[0] == index:
            return self._last[1]
        offset, length, checksum = self._chunks[index]
        data = self._read(offset, length, what)
        if zlib.crc32(data) != checksum:
            raise CorruptError(
                f"{what}: bytes {offset} to {offset + length} of the file are not what was written",
                where=str(self.path),
                remedy=_OTHER_COPY,
            )
        return data

    def _read(self, low: int, count: int, what: str) -> bytes:
        with disk_errors(self.path), self.path.open("rb") as file:
            file.seek(low)
            data = file.read(count)
        if len(data) < count:
            raise CorruptError(f"{what}: the file is truncated", where=str(self.path), remedy=_OTHER_COPY)
        return data


class TensorFile:
    """A safetensors file, read a run of elements at a time.

    Args:
        path: the file.
        chunks: checksums of all its bytes, in file order, if there are some.

    Attributes:
        places: where each tensor lies, by name.

    Raises:
        CheckpointError: if it is missing or is not a safetensors file.
        CorruptError: if its length or header is not what was written.
    """

    def __init__(self, path: Path, chunks: Sequence[Chunk] | None = None) -> None:
        self._bytes = FileBytes(path, chunks)
        self.path = path
        if self._bytes.num_bytes < _LENGTH_BYTES:
            raise _not_safetensors(path, "it is too short")
        length = int.from_bytes(self._bytes.read(0, _LENGTH_BYTES, "the header"), "little")
        if length > min(_MAX_HEADER_BYTES, self._bytes.num_bytes - _LENGTH_BYTES):
            raise _not_safetensors(path, "its header is longer than the file")
        header = self._bytes.read(_LENGTH_BYTES, length, "the header")
        self.places = _parse_places(path, header, self._bytes.num_bytes)

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """`count` elements of tensor `name` from its element `start` on, 1-D.

        Raises:
            CorruptError: if they are not those that were written.
        """
        place = self.places[name]
        if count == 0:
            return torch.empty(0, dtype=place.dtype)
        size = place.dtype.itemsize
        data = self._bytes.read(place.offset + start * size, count * size, f"tensor {name}")
        return torch.frombuffer(bytearray(data), dtype=place.dtype)

    def read_whole(self, name: str) -> torch.Tensor:
        """Tensor `name` in its shape."""
        shape = self.places[name].shape
        return self.read(name, 0, math.prod(shape)).view(shape)

    def verify(self) -> None:
        """Read every tensor and compare it with its checksums."""
        for name, place in self.places.items():
            numel, run = math.prod(place.shape), CHUNK_BYTES // place.dtype.itemsize
            for start in range(0, numel, run):
                self.read(name, start, min(run, numel - start))


def _parse_places(path: Path, header: bytes, file_bytes: int) -> dict[str, TensorPlace]:
    start = _LENGTH_BYTES + len(header)
    try:
        entries = json.loads(header).items()
        places = {name: _parse_place(entry, start) for name, entry in entries if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_safetensors(path, f"its header cannot be read ({error!r})") from error
    for name, place in places.items():
        if not start <= place.offset <= place.offset + place.num_bytes <= file_bytes:
            raise _not_safetensors(path, f"tensor {name} lies outside of it")
    return places


def _parse_place(entry: Mapping[str, Any], start: int) -> TensorPlace:
    first, end = map(int, entry["data_offsets"])
    place = TensorPlace(DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])), start + first)
    if place.num_bytes != end - first:
        raise ValueError(f"{end - first} bytes for shape {place.shape}")
    return place


def _not_safetensors(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"this is no safetensors file, or a damaged one: {why}",
        where=str(path),
        remedy="copy it again, or save it anew with safetensors; pickled weights are not read",
    )
