"""Training states in files: any nesting of tensors and plain values, saved in pieces and loaded lazily.

A state is one safetensors file, which any reader of that format opens. Its metadata hold the structure with
the plain values (JSON), a checksum for every `CHUNK_BYTES` of each tensor, and a checksum of the header.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwater.api.structure import decode, encode
from headwater.api.transaction import is_open
from headwater.api.writing import write_tensors
from headwater.core.checked_files import CHUNK_BYTES, Chunk
from headwater.core.cleanup import on_failure
from headwater.core.errors import CheckpointError
from headwater.core.file_tensor import FileTensor
from headwater.core.files import PARTIAL_SUFFIX, check_replaceable, disk_errors, lookup_errors, sync_folder
from headwater.core.interrupts import UninterruptedContext
from headwater.core.lazy import LazyTensor
from headwater.core.mdl import is_mdl, read_mdl
from headwater.core.pickles import load_pickled
from headwater.core.safetensors import DTYPE_CODES, TensorFile, TensorFileWriter, TensorPlace
from headwater.fabric.membership import current

logger = logging.getLogger(__name__)

_STATE, _CHECKSUMS, _SEAL, _VERSION = (
    f"headwater.{key}" for key in ("state", "checksums", "seal", "version")
)
_FORMAT_VERSION = "1"
_CHECKSUM_DIGITS = 8
_READ_AT_ONCE_BYTES = 1 << 16
"""Tensors up to this size are read at once: optimizers change step counts in place, and lazy tensors cannot
be changed."""

_LEGACY_PICKLE = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of a file in the old format of `torch.save`, before zip archives."""


def save(state: Any, path: str | os.PathLike[str]) -> None:
    """Save a training state to one file, in pieces: a lazy tensor is never whole in memory.

    The file appears under its name when it is complete and on disk. Until then, and if anything fails, an
    older file of this name stays unchanged. Tensors that are the same memory, or the same streamed weight,
    are written once. With several ranks, rank 0 writes the file, and all ranks wait for it.

    Args:
        state: dicts, lists and tuples, in any nesting, of tensors, numbers, strings, bools and `None`: the
            `state_dict()` of models, optimizers, schedulers and scalers, a step count, and so on.
        path: the file.

    Raises:
        CheckpointError: if the state holds any other value (the error says where), if another process or
            thread is saving this file, or if several ranks save within a step.
        RunError: if a folder or a device lies at `path`.
        DiskFullError: if the disk is full.
    """
    if current().size > 1 and is_open():
        raise CheckpointError(
            "with several ranks, a state cannot be saved inside a traced step",
            where=str(path),
            remedy="save it after the step, or in a checkpoint_closure",
        )
    current().agree(lambda: _save(state, Path(path)), None, "a file to be saved")


def _save(state: Any, path: Path) -> None:
    check_replaceable(path)
    structure, tensors = encode(state)
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with UninterruptedContext(_replacing(path)) as unfinished:
        metadata = {_VERSION: _FORMAT_VERSION, _STATE: json.dumps(structure), _SEAL: "0" * _CHECKSUM_DIGITS}
        # The checksums are not known yet. Zeros reserve their space, so that the header keeps its length.
        num_chunks = sum(-(-tensor.nbytes // CHUNK_BYTES) for tensor in tensors.values())
        metadata[_CHECKSUMS] = "0" * _CHECKSUM_DIGITS * num_chunks
        with TensorFileWriter(unfinished, layout, metadata) as file:
            write_tensors(tensors, dict.fromkeys(tensors, file))
            file.metadata[_CHECKSUMS] = "".join(map(_digits, (checksum for _, _, checksum in file.chunks)))
            file.metadata[_SEAL] = _seal(file.metadata, file.places)


def load(path: str | os.PathLike[str], map_location: torch.device | str | None = None) -> Any:
    """Load a file of `save`, `torch.save`, safetensors or Cerebras' `cstorch.save`, without running its code.

    Tensors are on the CPU. Large tensors are lazy: their values are read, and compared with their checksums,
    when they are used, for example by `load_state_dict`. Until then the file may be replaced by another file,
    but must not be changed in place.

    Args:
        path: the file.
        map_location: read all tensors now and copy them to this device.

    Returns:
        The saved state; the tensors by name if another program wrote the safetensors file. For an older file
        of `cstorch.save`, see `headwater.core.mdl.Mdl.nested`.

    Raises:
        CheckpointError: if the file is missing, damaged, of another kind, or a pickle that holds other
            objects than tensors and plain values.
        CorruptError: here or when a tensor is used, if its bytes do not match the checksum.
        ConfigError: if this user may not look up the path, or a package that reads the file is missing.
    """
    path = Path(path)
    with lookup_errors():
        is_folder, is_pickled = path.is_dir(), _is_pickled(path)
    if is_folder:
        raise CheckpointError(
            "expected a file, found a folder",
            where=str(path),
            remedy="read a folder in Hugging Face's format with load_pretrained; for a checkpoint of "
            "headwater fit, first run headwater checkpoint export",
        )
    if is_pickled:
        return load_pickled(path, map_location or "cpu")
    if is_mdl(path):
        return _load_mdl(path, map_location)
    file = TensorFile(path, hold=True)
    is_state = any(key.startswith("headwater.") for key in file.metadata)
    structure = _checked_structure(file) if is_state else None
    tensors = lazy_tensors(file)
    if map_location is not None:
        tensors = {name: tensor.to(map_location) for name, tensor in tensors.items()}
    return decode(structure, tensors) if is_state else tensors


def _load_mdl(path: Path, map_location: torch.device | str | None) -> Any:
    """Load a file of Cerebras' `cstorch.save`. Pickled objects in it are left out with a warning."""
    found = read_mdl(path)
    if found.unread:
        logger.warning(
            "%s: left out %d values that are pickled or in other files: %s",
            path,
            len(found.unread),
            ", ".join(found.unread[:5]),
        )
    values: dict[str, Any] = {}
    same: dict[FileTensor, Tensor] = {}  # a tensor with several names stays one tensor
    for name, value in found.values.items():
        if isinstance(value, FileTensor):
            if value not in same:
                tensor = _lazy_mdl_tensor(value)
                same[value] = tensor if map_location is None else tensor.to(map_location)
            values[name] = same[value]
        else:
            values[name] = value
    return found.nested(values)


def _lazy_mdl_tensor(tensor: FileTensor) -> Tensor:
    if tensor.num_bytes <= _READ_AT_ONCE_BYTES:
        return tensor.read()
    return LazyTensor.whole(tensor.read, tensor.shape, tensor.dtype)


def lazy_tensors(file: TensorFile) -> dict[str, Tensor]:
    """Return the tensors of a file by name, in file order.

    They are lazy, except for the smallest, which are read now.
    """
    places = sorted(file.places.items(), key=lambda item: item[1].offset)
    return {name: _lazy_tensor(file, name, place) for name, place in places}


def _lazy_tensor(file: TensorFile, name: str, place: TensorPlace) -> Tensor:
    if place.num_bytes <= _READ_AT_ONCE_BYTES:
        return file.read_whole(name)
    return LazyTensor(partial(file.read_pieces, name), place.shape, place.dtype)


def _is_pickled(path: Path) -> bool:
    if not path.is_file():
        return False
    with disk_errors(path), path.open("rb") as file:
        return file.read(len(_LEGACY_PICKLE)).startswith((b"PK\x03\x04", _LEGACY_PICKLE))


def _checked_structure(file: TensorFile) -> Any:
    """Return the structure of the state in a file of `save`. Later reads of its tensors are checked."""
    try:
        if file.metadata[_SEAL] != _seal(file.metadata, file.places):
            raise ValueError("its checksum does not match")
        version, structure = file.metadata[_VERSION], json.loads(file.metadata[_STATE])
        if version == _FORMAT_VERSION:
            file.expect(_chunks(file))
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"the header is damaged: {error}", where=str(file.path), remedy="use another copy of the file"
        ) from error
    if version != _FORMAT_VERSION:
        raise CheckpointError(
            f"the file has format version {version}, but this version of headwater reads {_FORMAT_VERSION}",
            where=str(file.path),
            remedy="install the version of headwater that wrote it, or a newer one",
        )
    return structure


def _chunks(file: TensorFile) -> list[Chunk]:
    """Return (offset, length, checksum) for each chunk of a file, from its metadata."""
    spans = [
        (place.offset + first, min(CHUNK_BYTES, place.num_bytes - first))
        # The checksums have no names. They are in the order in which `save` wrote the tensors.
        for place in sorted(file.places.values(), key=lambda place: place.offset)
        for first in range(0, place.num_bytes, CHUNK_BYTES)
    ]
    digits = file.metadata[_CHECKSUMS]
    starts = range(0, len(digits), _CHECKSUM_DIGITS)
    checksums = (int(digits[start : start + _CHECKSUM_DIGITS], 16) for start in starts)
    return [(*span, checksum) for span, checksum in zip(spans, checksums, strict=True)]


def _seal(metadata: Mapping[str, str], places: Mapping[str, TensorPlace]) -> str:
    """Return the checksum of a file's header."""
    tensors = [[n, DTYPE_CODES[p.dtype], p.shape, p.offset] for n, p in sorted(places.items())]
    entries = [metadata[key] for key in (_VERSION, _STATE, _CHECKSUMS)]
    return _digits(zlib.crc32(json.dumps([entries, tensors]).encode()))


def _digits(checksum: int) -> str:
    return f"{checksum:0{_CHECKSUM_DIGITS}x}"


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a new file beside `path`. At the end it replaces `path`; if the context raises it is removed.

    Only one process at a time can write this file. If a killed process has left it, it is overwritten.
    """
    unfinished = path.with_name(path.name + PARTIAL_SUFFIX)
    handle = _locked(unfinished, path)
    while not _is_at(unfinished, handle):
        # Between `open` and the lock, another process has renamed or removed the file that was opened.
        os.close(handle)
        handle = _locked(unfinished, path)
    try:
        with on_failure(lambda: unfinished.unlink(missing_ok=True)):
            yield unfinished
            with disk_errors(path):
                unfinished.replace(path)
                sync_folder(path.parent)
    finally:
        os.close(handle)


def _locked(unfinished: Path, path: Path) -> int:
    """Open the unfinished file, lock it, and return its descriptor."""
    with disk_errors(unfinished):
        # Without O_TRUNC: until the lock is taken, another process may be writing this file.
        handle = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    with on_failure(lambda: os.close(handle)):
        if os.fstat(handle).st_uid != os.geteuid():
            raise CheckpointError(
                "the unfinished file belongs to another user",
                where=str(unfinished),
                remedy="remove it, or save to a folder of your own",
            )
        _lock(handle, path)
    return handle


def _is_at(path: Path, handle: int) -> bool:
    """True if an open file has this name now."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _lock(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(
            "another process or thread is saving this file",
            where=str(path),
            remedy="save from one process, or under another name",
        ) from error
