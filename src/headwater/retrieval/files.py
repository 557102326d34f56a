"""The files of an index: passages with their vectors, the tokenizer, and a manifest with checksums.

A file of passages is a safetensors file with three tensors: `vectors`, fp32 [passages, dimension]; `records`,
the bytes of all passages, each a JSON list of title, text and source; and `ends`, int64 [passages], where the
record of each passage ends.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from pydantic import TypeAdapter
from torch import Tensor

from headwater.core.checked_files import Chunk, json_checksum
from headwater.core.errors import CorruptError, DataError
from headwater.core.files import disk_errors, kind_of, replace_file
from headwater.core.safetensors import Layout, TensorFileWriter, lay_out
from headwater.core.side_files import TOKENIZER_FILE
from headwater.data.codec import open_tokenizer
from headwater.data.passages import Passage

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MANIFEST_FILE = "index.json"
_KIND = "headwater index"
FORMAT_VERSION = 1
_REMEDY = "make the index again with headwater index, or use another copy of it"


@dataclasses.dataclass(frozen=True)
class EncoderIdentity:
    """The trained model with which an index was made.

    Attributes:
        model_dir: folder of its run.
        checkpoint: its checkpoint.
        weights: checksum of the weights in this checkpoint.
    """

    model_dir: str
    checkpoint: str
    weights: str


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """A file of passages.

    Attributes:
        name: its name.
        num_passages: passages in it.
        record_bytes: bytes of their records.
        chunks: checksums of all bytes of the file, in order.
    """

    name: str
    num_passages: int
    record_bytes: int
    chunks: list[Chunk]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a manifest file.

    Attributes:
        encoder: the model with which the index was made.
        dimension: elements of a vector.
        tokenizer: CRC-32 of the file of the tokenizer.
        end: id of the token that ends each text.
        files: the files of passages, in order.
    """

    encoder: EncoderIdentity
    dimension: int
    tokenizer: int
    end: int
    files: list[FileEntry]

    @property
    def num_passages(self) -> int:
        return sum(file.num_passages for file in self.files)

    def to_json(self) -> bytes:
        """Return the content of the manifest file; the inverse of `read_manifest`."""
        content = dataclasses.asdict(self)
        checksum = json_checksum(content)
        document = {
            "kind": _KIND,
            "format_version": FORMAT_VERSION,
            "checksum": checksum,
            "content": content,
        }
        return json.dumps(document).encode()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the index in `folder`.

    Raises:
        DataError: if the folder is not an index, or a newer version wrote it.
        CorruptError: if the manifest is damaged.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        found = kind_of(folder)
        if found == "a folder":
            what = f"the folder is not an index: it has no {MANIFEST_FILE}"
        else:
            what = "no such index" if found is None else f"expected the folder of an index, found {found}"
        raise DataError(what, where=str(folder), remedy="name the folder that headwater index wrote (--out)")
    try:
        document = _document(path)
        kind, version, checksum, content = (
            document[key] for key in ("kind", "format_version", "checksum", "content")
        )
        if kind != _KIND:
            raise DataError(
                f"expected a file that headwater index wrote, found another {MANIFEST_FILE}",
                where=str(path),
                remedy="name the folder that headwater index wrote (--out)",
            )
        # Before the checksum, because a newer version may compute it differently.
        if version == FORMAT_VERSION and checksum == json_checksum(content):
            return TypeAdapter(Manifest).validate_python(content)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptError("the manifest is damaged", where=str(path), remedy=_REMEDY) from error
    if version != FORMAT_VERSION:
        raise DataError(
            f"expected an index of format version {FORMAT_VERSION}, got version {version!r}",
            where=str(path),
            remedy="use the version of headwater that wrote it, or make the index again",
        )
    raise CorruptError("the manifest is damaged: its checksum differs", where=str(path), remedy=_REMEDY)


def is_index(folder: Path) -> bool:
    """True if the folder has a manifest that `headwater index` has written, also by another version."""
    path = folder / MANIFEST_FILE
    try:
        return path.is_file() and bool(_document(path)["kind"] == _KIND)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _document(path: Path) -> Any:
    with disk_errors(path):
        return json.loads(path.read_bytes())


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> int:
    """Write the tokenizer of an index, and return the checksum of the file."""
    content = tokenizer.to_str().encode()
    replace_file(folder / TOKENIZER_FILE, content)
    return zlib.crc32(content)


def read_tokenizer(folder: Path, checksum: int) -> Tokenizer:
    """Return the tokenizer of an index.

    Raises:
        ConfigError: if the tokenizers library is not installed.
        CorruptError: if the file is missing or damaged.
    """
    path = folder / TOKENIZER_FILE
    with disk_errors(path):
        if not path.is_file() or zlib.crc32(path.read_bytes()) != checksum:
            raise CorruptError("the tokenizer is missing or damaged", where=str(path), remedy=_REMEDY)
    return open_tokenizer(path)


def _layout(num_passages: int, dimension: int, record_bytes: int) -> Layout:
    return {
        "ends": (torch.int64, (num_passages,)),
        "vectors": (torch.float32, (num_passages, dimension)),
        "records": (torch.uint8, (record_bytes,)),
    }


def write_passages(path: Path, passages: Sequence[Passage], vectors: Tensor) -> FileEntry:
    """Write a file of passages, and return its entry for the manifest.

    Args:
        path: the file; an existing one is replaced.
        passages: the passages.
        vectors: their vectors, fp32 [passages, dimension].

    Raises:
        DiskFullError: if there is too little space.
    """
    records = [
        json.dumps([each.title, each.text, each.source], ensure_ascii=False).encode() for each in passages
    ]
    joined = torch.frombuffer(bytearray(b"".join(records)), dtype=torch.uint8)
    with TensorFileWriter(path, _layout(len(passages), vectors.shape[1], len(joined))) as file:
        file.write("ends", 0, torch.tensor([len(record) for record in records]).cumsum(0))
        file.write("vectors", 0, vectors)
        file.write("records", 0, joined)
    return FileEntry(path.name, len(passages), len(joined), file.chunks)


@final
class PassageFile:
    """A file of passages that is mapped into memory, so that the system reads and drops its pages as needed.

    All bytes are compared with their checksums once, before their first use.

    Args:
        path: the file.
        entry: its entry in the manifest.
        dimension: elements of a vector.

    Raises:
        CorruptError: if the file is missing, or does not have the expected length.
    """

    def __init__(self, path: Path, entry: FileEntry, dimension: int) -> None:
        self.path = path
        self.num_passages = entry.num_passages
        self._entry = entry
        head, self._places = lay_out(_layout(entry.num_passages, dimension, entry.record_bytes))
        num_bytes = len(head) + sum(place.num_bytes for place in self._places.values())
        found = path.stat().st_size if path.is_file() else 0
        if found != num_bytes or sum(length for _, length, _ in entry.chunks) != num_bytes:
            raise CorruptError(
                f"expected a file of {num_bytes} bytes, found {found} bytes", where=str(path), remedy=_REMEDY
            )
        # This mapping needs no open file descriptor: a large index has more files than a process may open.
        self._data = torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8)
        self._is_verified = False

    @property
    def vectors(self) -> Tensor:
        """The vectors, fp32 [passages, dimension], in the mapped memory.

        Raises:
            CorruptError: if a byte of the file is not as it was written.
        """
        return self._tensor("vectors")

    def passage(self, number: int) -> Passage:
        """Return a passage by its number in the file.

        Raises:
            CorruptError: if a byte of the file is not as it was written.
        """
        ends = self._tensor("ends")
        start = int(ends[number - 1]) if number else 0
        record = bytes(self._tensor("records")[start : int(ends[number])].numpy())
        title, text, source = json.loads(record)
        return Passage(text, title, source)

    def _tensor(self, name: str) -> Tensor:
        self._verify()
        place = self._places[name]
        values = self._data[place.offset : place.offset + place.num_bytes]
        return values.view(place.dtype).view(place.shape)

    def _verify(self) -> None:
        if self._is_verified:
            return
        data = self._data.numpy().data
        for offset, length, checksum in self._entry.chunks:
            if zlib.crc32(data[offset : offset + length]) != checksum:
                raise CorruptError(
                    f"bytes {offset} to {offset + length} of the file differ from what was written",
                    where=str(self.path),
                    remedy=_REMEDY,
                )
        self._is_verified = True
