"""Safetensors files that are written and read in ranges of elements, with a checksum for every chunk.

The format, from its documentation: the header's length (8 bytes, little-endian), the header (JSON: dtype,
shape and byte range of each tensor, counted from the header's end), then the tensors' bytes without gaps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from headwater.core.buffers import aligned_empty
from headwater.core.checked_files import CHUNK_BYTES, CheckedFile, Chunk, FileBytes
from headwater.core.errors import CheckpointError
from headwater.core.file_order import FileOrder
from headwater.core.files import disk_errors, why_unreadable
from headwater.core.gather import gather
from headwater.core.tensor_values import in_dtype
from headwater.core.threads import one_core
from headwater.core.transfers import PADDING_BYTES, Read, read_ahead, shared_transfers

DTYPE_CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64", torch.bool: "BOOL",
}  # fmt: skip
"""Dtype -> its name in the safetensors format."""

DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
"""Name of a dtype in the safetensors format -> dtype."""

_LENGTH_BYTES = 8
_LARGE_BYTES = 1 << 20  # tensors of this size are read by threads, ahead of the caller
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit

TensorKind = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and the shape of a tensor."""

Layout = Mapping[str, TensorKind]
"""Name -> dtype and shape of each tensor in a file."""


@dataclasses.dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor in a file. `offset` counts bytes from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def can_hold(tensor: torch.Tensor) -> bool:
    """True if a safetensors file can hold a tensor of this dtype and layout."""
    return tensor.layout is torch.strided and tensor.dtype in DTYPE_CODES


def lay_out(
    tensors: Layout, metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, TensorPlace]]:
    """Return the first bytes of a file for `tensors` and `metadata`, and the place of each tensor.

    Every dtype must be a key of `DTYPE_CODES`.
    """
    # Wide dtypes first: then every tensor is aligned without gaps. The format forbids gaps.
    by_alignment = sorted(tensors.items(), key=lambda item: -item[1][0].itemsize)
    places, position = {}, 0
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    for name, (dtype, shape) in by_alignment:
        place = places[name] = TensorPlace(dtype, shape, position)
        end = position + place.num_bytes
        header[name] = {"dtype": DTYPE_CODES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)  # data starts on a multiple of 8 bytes
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return head, {n: dataclasses.replace(p, offset=p.offset + len(head)) for n, p in places.items()}


class TensorFileWriter(CheckedFile):
    """A safetensors file whose tensors are written in runs of elements, in any order.

    Args:
        path: where it is created.
        tensors: dtype and shape of each tensor, by name.
        metadata: further entries of the header.
        checksums: see `CheckedFile`.

    Attributes:
        places: where each tensor lies, by name.
        metadata: the entries. They may change until the file is closed, if the header's length stays.
    """

    def __init__(
        self,
        path: Path,
        tensors: Layout,
        metadata: Mapping[str, str] | None = None,
        *,
        checksums: bool = True,
    ) -> None:
        self._tensors = tensors
        self.metadata = dict(metadata or {})
        head, self.places = lay_out(tensors, self.metadata)
        self._head_bytes = len(head)
        num_bytes = len(head) + sum(place.num_bytes for place in self.places.values())
        super().__init__(path, num_bytes, checksums=checksums)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                # The header is written last, because the metadata may have changed.
                head, _ = lay_out(self._tensors, self.metadata)
                assert len(head) == self._head_bytes, "the metadata has changed in length"
                self.put(0, memoryview(head))
        finally:
            super().__exit__(kind, *rest)

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Write a run of elements of tensor `name` that begins with its element `start`."""
        place = self.places[name]
        assert values.dtype == place.dtype, f"{name} is laid out as {place.dtype}, not {values.dtype}"
        self.put(place.offset + start * place.dtype.itemsize, as_bytes(values))

    def write_converted(self, name: str, start: int, values: torch.Tensor) -> None:
        """Write a run of elements as `write` does, converted to the dtype of the tensor."""
        with one_core():
            converted = values.to(self.places[name].dtype)
        self.write(name, start, converted)

    def write_zeros(self, name: str, start: int, count: int) -> None:
        """Write zeros to a run of `count` elements of tensor `name` that begins with its element `start`."""
        size = self.places[name].dtype.itemsize
        self.put_zeros(self.places[name].offset + start * size, count * size)

    def write_pieces(self, name: str, pieces: Iterable[torch.Tensor]) -> None:
        """Write tensor `name` from pieces in order, converted to its dtype in the file."""
        start = 0
        for piece in pieces:
            self.write_converted(name, start, piece)
            start += piece.numel()


def as_bytes(values: torch.Tensor) -> memoryview:
    """Return the bytes of a host tensor, without a copy if it is contiguous."""
    return values.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data


class TensorFile:
    """A safetensors file that is read a run of elements at a time.

    Args:
        path: the file.
        chunks: checksums of all its bytes, in file order, if known.
        hold: keep the file open, so that it is still read if another file takes its name.

    Attributes:
        places: where each tensor lies, by name.
        metadata: further entries of the header.

    Raises:
        CheckpointError: if it is missing or not a safetensors file.
        CorruptError: if its length or header is not what was written.
    """

    def __init__(self, path: Path, chunks: Sequence[Chunk] | None = None, *, hold: bool = False) -> None:
        self._bytes = FileBytes(path, chunks, hold=hold)
        self._transfers = shared_transfers()  # kept, so that not every read starts threads
        self.path = path
        if self._bytes.num_bytes < _LENGTH_BYTES:
            raise _not_safetensors(path, "it is too short")
        length = int.from_bytes(self._bytes.read(0, _LENGTH_BYTES, "the header"), "little")
        # Checked before the header is read: a damaged length must not take all memory.
        if length > min(_MAX_HEADER_BYTES, self._bytes.num_bytes - _LENGTH_BYTES):
            raise _not_safetensors(path, "its header is longer than the file")
        header = self._bytes.read(_LENGTH_BYTES, length, "the header")
        self._head_bytes = _LENGTH_BYTES + length
        self.places, self.metadata = _parse_header(path, header, self._bytes.num_bytes)
        spans = {name: (place.offset, place.num_bytes) for name, place in self.places.items()}
        large = {name: span for name, span in spans.items() if span[1] >= _LARGE_BYTES}
        self._in_order = FileOrder(self._bytes, large)

    def expect(self, chunks: Sequence[Chunk]) -> None:
        """Compare all bytes that are read from now on with their checksums.

        Args:
            chunks: checksums of all bytes behind the header.

        Raises:
            CorruptError: if the file's length is not that of header and chunks.
        """
        head = self._bytes.read(0, self._head_bytes, "the header")
        self._bytes.expect([(0, len(head), zlib.crc32(head)), *chunks])

    def read(self, name: str, start: int, count: int) -> torch.Tensor:
        """Return `count` elements of tensor `name` from its element `start` on, 1-D.

        Raises:
            CorruptError: if the bytes are not those that were written.
        """
        place = self.places[name]
        size = place.dtype.itemsize
        if count * size >= _LARGE_BYTES:
            return gather(read_runs(self._runs(name, start, count)), (count,), place.dtype)
        values = torch.empty(count, dtype=place.dtype, device="cpu")
        if count:
            self._bytes.read_into(place.offset + start * size, as_bytes(values), f"tensor {name}")
        return values

    def read_padded(self, name: str, start: int, count: int, buffer: torch.Tensor) -> torch.Tensor:
        """Read a run of elements of tensor `name` to a padded buffer, and return its bytes there.

        Args:
            name: the tensor.
            start: the first element.
            count: number of elements.
            buffer: page-aligned uint8 memory, `PADDING_BYTES` larger than the run.

        Raises:
            CorruptError: if the bytes are not those that were written.
        """
        place = self.places[name]
        size = place.dtype.itemsize
        if count == 0:
            return buffer[:0]
        return self._bytes.read_padded(place.offset + start * size, count * size, buffer, f"tensor {name}")

    def read_whole(self, name: str) -> torch.Tensor:
        """Return tensor `name` in its shape."""
        place = self.places[name]
        return gather(self.read_pieces(name), place.shape, place.dtype)

    def read_pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield tensor `name` in order, in 1-D pieces of up to `CHUNK_BYTES`, each valid until the next.

        Tensors that are requested in file order are read ahead; see `FileOrder`.
        """
        place = self.places[name]
        if place.num_bytes < _LARGE_BYTES:
            yield self.read(name, 0, math.prod(place.shape))
        else:
            for data in self._in_order.pieces(name):
                yield in_dtype(data, place.dtype)

    def _runs(self, name: str, start: int, count: int) -> list[Run]:
        """Return `count` elements of tensor `name` as runs of up to `CHUNK_BYTES`, in order."""
        at_once, stop = CHUNK_BYTES // self.places[name].dtype.itemsize, start + count
        return [(self, name, first, min(at_once, stop - first)) for first in range(start, stop, at_once)]

    def verify(self) -> None:
        """Read every tensor and compare it with its checksums."""
        buffer = aligned_empty(CHUNK_BYTES + PADDING_BYTES)
        for name, place in self.places.items():
            for _, _, start, count in self._runs(name, 0, math.prod(place.shape)):
                self.read_padded(name, start, count, buffer)


Run = tuple[TensorFile, str, int, int]
"""A run of elements of a tensor in a file: the file, the tensor's name, the first element, their number."""


def read_runs(runs: Iterable[Run]) -> Generator[torch.Tensor, None, None]:
    """Yield runs in their order, 1-D, while threads read the next ones. Each is valid until the next.

    Raises:
        CorruptError: if the bytes are not those that were written.
    """
    dtypes: deque[torch.dtype] = deque()

    def reads() -> Iterator[Read]:
        for file, name, start, count in runs:
            dtype = file.places[name].dtype
            dtypes.append(dtype)
            yield count * dtype.itemsize, partial(file.read_padded, name, start, count)

    for data in read_ahead(reads()):
        yield in_dtype(data, dtypes.popleft())


def _parse_header(
    path: Path, header: bytes, file_bytes: int
) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    start = _LENGTH_BYTES + len(header)
    try:
        entries = json.loads(header)
        metadata = dict(entries.pop("__metadata__", {}))
        places = {name: _parse_place(entry, start) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _not_safetensors(path, f"its header cannot be read ({error!r})") from error
    for name, place in places.items():
        if not start <= place.offset <= place.offset + place.num_bytes <= file_bytes:
            raise _not_safetensors(path, f"tensor {name} lies outside of the file")
    return places, metadata


def _parse_place(entry: Mapping[str, Any], start: int) -> TensorPlace:
    first, end = map(int, entry["data_offsets"])
    place = TensorPlace(DTYPES[entry["dtype"]], tuple(map(int, entry["shape"])), start + first)
    if any(size < 0 for size in place.shape):
        raise ValueError(f"a negative size in shape {place.shape}")
    if place.num_bytes != end - first:
        raise ValueError(f"{end - first} bytes for shape {place.shape}")
    return place


def _not_safetensors(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"not a safetensors file, or a damaged one: {why}",
        where=str(path),
        remedy="copy it again, or save it again with safetensors; pickled weights are not read",
    )


def indexed_files(index: Path) -> list[Path]:
    """Return the files that an index of Hugging Face's format lists, in the order of its tensors.

    Args:
        index: the index. Its files are in the same folder, and may be missing.

    Raises:
        CheckpointError: if the index is damaged.
        StoreError: if the system refuses to read the index.
    """
    with disk_errors(index):
        data = index.read_bytes()
    try:
        names = dict.fromkeys(json.loads(data)["weight_map"].values())
        outside = next((name for name in names if Path(name).name != name), None)
        if outside is not None:
            raise ValueError(f"expected names of files in the folder, got {outside}")
        if not names:
            raise ValueError("expected the name of at least one file in weight_map, got none")
        paths = [index.with_name(name) for name in names]
        for path in paths:
            path.exists()  # raises for an invalid file name, for example one with a null byte
        return paths
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"the index cannot be read: {why_unreadable(error)}",
            where=str(index),
            remedy="copy the file again",
        ) from error
