"""Checksums of the samples in HDF5 files: written beside the data, compared when a sample is read.

A file with checksums has the attribute `MARK`. The checksums are 64-bit numbers. They are stored as
attributes of each dataset, not as datasets, so that programs that read all datasets of a file are not
affected. A checksum covers the name of the dataset, the index of the sample, and its dtype, shape and values.
It therefore also detects a damaged file index that returns a different sample. A file without these
attributes is not checked.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from headwater.core.errors import DataError

MARK = "sample_checksums"
_KIND = "multilinear64"
_ATTRIBUTE = "checksums_"
_BLOCK = 4096
"""Number of checksums in one attribute; HDF5 allows 64 KiB."""

Checksums = npt.NDArray[np.uint64]

DAMAGE = (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError, AttributeError)
"""Exceptions of h5py for a damaged file."""


def cannot_open(path: Path, error: Exception, remedy: str) -> DataError:
    """Return the error for a file that h5py cannot open.

    Args:
        path: the file.
        error: the exception of h5py.
        remedy: what to do, unless the user has no right to read the file.
    """
    if isinstance(error, PermissionError):
        return DataError(
            "HDF5 file cannot be opened: Permission denied",
            where=str(path),
            remedy="give this user the right to read the file and the folders on the way to it",
        )
    return DataError(f"HDF5 file cannot be opened: {error}", where=str(path), remedy=remedy)


_REMEDY = "copy the file again, or prepare the data again (headwater data)"

_STEP = 0x9E3779B97F4A7C15
"""Odd number, added to a checksum once per index, so that equal samples have different checksums."""


def sample_checksums(name: str, indices: Sequence[int], values: npt.NDArray[Any]) -> Checksums:
    """Return the checksum of each sample: a sum of its 64-bit words, with an odd weight for each position.

    This is multilinear hashing (arXiv:1202.4961). It detects every flipped bit and is faster than CRC-32.

    Args:
        name: name of the dataset.
        indices: indices of the samples in the dataset.
        values: the samples as h5py returns them, [samples, …].

    Returns:
        Checksums, uint64 [samples].
    """
    if values.dtype == object:
        texts = (_texts(name, index, value) for index, value in zip(indices, values, strict=True))
        return np.concatenate([np.empty(0, dtype=np.uint64), *texts])
    words = _words(values.reshape(len(values), -1))
    # The upper half of each word is mixed into the lower half first. Otherwise two flipped top bits would
    # cancel each other.
    mixed = np.right_shift(words, np.uint64(32))
    np.bitwise_xor(mixed, words, out=mixed)
    np.multiply(mixed, _multipliers(words.shape[1]), out=mixed)
    places = np.array(indices, dtype=np.uint64) * np.uint64(_STEP)
    checksums: Checksums = np.add.reduce(mixed, axis=1) + places + _head(name, values.dtype, values.shape[1:])
    return checksums


def _texts(name: str, index: int, value: Any) -> Checksums:
    """Return the checksum [1] of a sample that is a text or an array of texts."""
    texts = np.atleast_1d(np.asarray(value, dtype=object)).reshape(-1)
    encoded = (text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text for text in texts)
    # Zeros separate the texts. Otherwise "ab", "c" and "a", "bc" would have the same checksum.
    return sample_checksums(name, [index], np.frombuffer(b"\0".join(encoded), dtype=np.uint8)[None])


def _words(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return the bytes of each row as 64-bit words, padded with zeros."""
    data = np.ascontiguousarray(rows).view(np.uint8)
    if missing := -data.shape[1] % 8:
        data = np.pad(data, ((0, 0), (0, missing)))
    return data.view(np.uint64)


@functools.lru_cache(maxsize=64)
def _multipliers(count: int) -> npt.NDArray[np.uint64]:
    """Return `count` odd pseudo-random numbers (splitmix64), one per position in a row."""
    state = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31)) | np.uint64(1)


@functools.lru_cache(maxsize=256)
def _head(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.uint64:
    """Return the part of a checksum that depends on the dataset's name and on dtype and shape of a sample."""
    return np.uint64(zlib.crc32(f"{name} {dtype.str} {shape}".encode()) * _STEP % (1 << 64))


def write_checksums(file: h5py.File, checksums: Mapping[str, Checksums]) -> None:
    """Write the checksums of all samples into an open file; `checksums` has them by name of the dataset."""
    file.attrs[MARK] = _KIND
    for name, values in checksums.items():
        for start in range(0, len(values), _BLOCK):
            file[name].attrs[f"{_ATTRIBUTE}{start}"] = values[start : start + _BLOCK]


class CheckedSamples:
    """Reader of the samples of an open HDF5 file that compares each with its checksum.

    Args:
        file: the open file; the caller closes it.
        path: path of the file, for error messages.
    """

    def __init__(self, file: h5py.File, path: Path) -> None:
        self._file = file
        self._path = path
        self._known: dict[str, tuple[h5py.Dataset, Checksums | None]] = {}

    def check(self, name: str) -> None:
        """Raise if a dataset cannot be opened, or does not have one checksum per sample.

        Raises:
            DataError: if it cannot be opened, or the numbers of samples and checksums differ.
        """
        if name not in self._known:
            try:
                self._known[name] = self._open(name)
            except DAMAGE as error:
                what = f"the dataset {name!r} cannot be read: {error}"
                raise DataError(what, where=str(self._path), remedy=_REMEDY) from error

    def _open(self, name: str) -> tuple[h5py.Dataset, Checksums | None]:
        samples = self._file[name]
        parts = [samples.attrs[attribute] for attribute in samples.attrs if attribute.startswith(_ATTRIBUTE)]
        if MARK not in self._file.attrs and not parts:
            return samples, None
        starts = range(0, len(samples), _BLOCK)
        found = [samples.attrs[f"{_ATTRIBUTE}{start}"] for start in starts]
        checksums = np.concatenate([np.empty(0, dtype=np.uint64), *found])
        if len(parts) != len(starts) or len(checksums) != len(samples):
            raise ValueError(f"found {len(samples)} samples, but {sum(map(len, parts))} checksums")
        return samples, checksums

    def read(self, name: str, index: int) -> Any:
        """Return sample `index` of dataset `name`, compared with its checksum.

        Raises:
            DataError: if the sample cannot be read, or does not match its checksum.
        """
        value = self.read_unchecked(name, index)
        # The checksum was computed from an array of objects. By default numpy makes texts of fixed width.
        values = np.empty(1, dtype=object) if isinstance(value, bytes | str) else np.asarray(value)[None]
        if isinstance(value, bytes | str):
            values[0] = value
        self.verify(name, [index], values)
        return value

    def read_unchecked(self, name: str, index: int) -> Any:
        """Return a sample without comparing its checksum.

        The caller passes it to `verify` together with others, which is faster than `read` for each.

        Raises:
            DataError: if the sample cannot be read.
        """
        if name not in self._known:
            self.check(name)
        try:
            return self._known[name][0][index]
        except DAMAGE as error:
            where = f"{self._path}, sample {index}"
            raise DataError(f"sample cannot be read: {error}", where=where, remedy=_REMEDY) from error

    def verify(self, name: str, indices: Sequence[int], values: npt.NDArray[Any]) -> None:
        """Compare samples with their checksums; do nothing if the file has no checksums.

        Args:
            name: name of the dataset.
            indices: indices of the samples in the dataset.
            values: the samples as h5py returned them, [samples, …].

        Raises:
            DataError: if a sample does not match its checksum.
        """
        checksums = self._known[name][1]
        if checksums is None:
            return
        found = sample_checksums(name, indices, values)
        for index, is_whole in zip(indices, found == checksums[list(indices)], strict=True):
            if not is_whole:
                raise DataError(
                    f"sample is damaged: its values in {name!r} do not match their checksum",
                    where=f"{self._path}, sample {index}",
                    remedy=_REMEDY,
                )
