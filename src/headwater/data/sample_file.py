"""HDF5 files of GPT samples: the only place that writes and checks their layout.

A file holds one dataset `data`, int32 [samples, 3, sequence_length]. The three channels are `CHANNELS`. If a
sample packs several texts that do not attend to each other, there are five, `SPAN_CHANNELS`. This is the
layout of the public Cerebras Model Zoo, in which `attention_mask` marks the positions that count in the loss.
Each sample has a checksum, see `headwater.data.checksums`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from headwater.core.errors import DataError
from headwater.data.checksums import (
    DAMAGE,
    CheckedSamples,
    Checksums,
    cannot_open,
    sample_checksums,
    write_checksums,
)
from headwater.data.staging import complete_file

CHANNELS = ("input_ids", "attention_mask", "labels")
SPAN_CHANNELS = (*CHANNELS, "attention_span", "position_ids")
"""`CHANNELS` and two more: `attention_span`, the number of following tokens that belong to the same text; and
`position_ids`, the position of a token in its text."""

BLOCK_SAMPLES = 64
"""Number of samples in memory while a file is written."""

Samples = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class SampleFile:
    """A file of GPT samples whose layout was checked.

    Attributes:
        path: path of the file.
        num_samples: number of samples.
        sequence_length: tokens per sample.
        channels: names of the channels of a sample.
    """

    path: Path
    num_samples: int
    sequence_length: int
    channels: tuple[str, ...] = CHANNELS


def make_samples(windows: Samples) -> Samples:
    """Return samples [n, 3, length] of `windows` [n, length + 1]; a token's label is the token after it."""
    inputs, labels = windows[:, :-1], windows[:, 1:]
    return np.stack([inputs, np.ones_like(inputs), labels], axis=1)


def write_sample_file(path: Path, blocks: Iterable[Samples], num_samples: int) -> None:
    """Write samples to an HDF5 file.

    Args:
        path: file to write; it appears when it is complete.
        blocks: some samples each, [n, channels, length].
        num_samples: total number of samples in all blocks.
    """
    write_datasets(path, ({"data": block} for block in blocks), num_samples)


def write_datasets(
    path: Path,
    blocks: Iterable[Mapping[str, npt.NDArray[Any]]],
    num_samples: int,
    *,
    dtype: str | None = "i4",
    compression: str | None = "gzip",
) -> None:
    """Write an HDF5 file with one dataset [samples, …] per name, and checksums.

    The same samples produce the same bytes.

    Args:
        path: file to write; it appears when it is complete.
        blocks: some samples each, as arrays [n, …] by name; all blocks have the same names.
        num_samples: total number of samples in all blocks.
        dtype: dtype of all datasets except texts; `None`: the dtype of the values.
        compression: name of an HDF5 compression filter, or `None`.
    """
    packed = {"compression": compression, "shuffle": True} if compression else {}
    if compression == "gzip":
        packed["compression_opts"] = 1
    checksums: dict[str, Checksums] = {}
    with complete_file(path) as partial, h5py.File(partial, "w") as file:
        file.attrs["n_examples"] = num_samples
        start = 0
        for block in blocks:
            for name, values in block.items():
                if name not in file:
                    shape = values.shape[1:]
                    # One sample per chunk: training reads single samples in random order, and HDF5
                    # decompresses whole chunks.
                    chunks = (1, *shape) if shape else (num_samples,)
                    kind = h5py.string_dtype() if values.dtype == object else dtype or values.dtype
                    file.create_dataset(name, (num_samples, *shape), kind, chunks=chunks, **packed)
                    checksums[name] = np.zeros(num_samples, dtype=np.uint64)
                # Checksums are of the file's dtype, because they are compared with values that are read back.
                stored, end = values.astype(file[name].dtype, copy=False), start + len(values)
                file[name][start:end] = stored
                checksums[name][start:end] = sample_checksums(name, range(start, end), stored)
            start += len(values)
        write_checksums(file, checksums)
        assert start == num_samples, f"{start} samples arrived for a file of {num_samples}"


def open_sample_file(path: Path) -> h5py.File:
    """Open a file of GPT samples for reading and check its layout.

    Raises:
        DataError: if it is not an HDF5 file of GPT samples, or is damaged.
    """
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise cannot_open(path, error, "prepare the data again (headwater data)") from error
    try:
        _check_layout(file, path)
        CheckedSamples(file, path).check("data")
    except DataError:
        file.close()
        raise
    except DAMAGE as error:
        file.close()
        what = f"HDF5 file is damaged: {error}"
        raise DataError(what, where=str(path), remedy="prepare the data again (headwater data)") from error
    return file


def check_sample_file(path: Path) -> SampleFile:
    """Check a file of GPT samples and return the number, length and channels of its samples.

    Raises:
        DataError: if it is not an HDF5 file of GPT samples, or is damaged.
    """
    with open_sample_file(path) as file:
        num_samples, channels, sequence_length = file["data"].shape
        return SampleFile(path, num_samples, sequence_length, SPAN_CHANNELS[:channels])


def _check_layout(file: h5py.File, path: Path) -> None:
    remedy = f"write int32 [samples, {len(CHANNELS)}, sequence_length] as headwater data does"
    data = file.get("data")
    if "img_path" in file:
        raise DataError(
            "the file holds texts with images, but this model reads only text",
            where=str(path),
            remedy="train a multimodal model on it (LlavaHDF5MapDataProcessor), or use other data",
        )
    if not isinstance(data, h5py.Dataset):
        names = ", ".join(map(repr, file)) or "none"
        what = f"HDF5 file has no dataset 'data'; its datasets: {names}"
        raise DataError(what, where=str(path), remedy=remedy)
    if data.ndim != 3 or data.shape[1] not in (len(CHANNELS), len(SPAN_CHANNELS)):
        what = (
            f"expected dataset 'data' of shape [samples, {len(CHANNELS)} or {len(SPAN_CHANNELS)}, "
            f"sequence_length], got {list(data.shape)}"
        )
        raise DataError(what, where=str(path), remedy=remedy)
    if not np.issubdtype(data.dtype, np.integer):
        raise DataError(
            f"expected integers in dataset 'data', got {data.dtype}", where=str(path), remedy=remedy
        )
