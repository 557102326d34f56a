"""The HDF5 files of GPT samples: their layout, written and checked here alone.

A file holds one dataset `data`, int32 [samples, 3, sequence_length]; the three are `CHANNELS`. Where a sample
holds texts that do not see each other there are two more, `SPAN_CHANNELS`. It is the layout of the public
Cerebras Model Zoo, where `attention_mask` says which positions count in the loss. Each sample has a checksum,
see `headwater.data.checksums`.
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
from headwater.data.checksums import DAMAGE, CheckedSamples, Checksums, sample_checksums, write_checksums

CHANNELS = ("input_ids", "attention_mask", "labels")
SPAN_CHANNELS = (*CHANNELS, "attention_span", "position_ids")
"""`attention_span` is how many of the tokens that follow are of the same text, `position_ids` count in it."""

Samples = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class SampleFile:
    """A file that was checked.

    Attributes:
        path: where it is.
        num_samples: samples in it.
        sequence_length: tokens of a sample.
        channels: what a sample holds for each token.
    """

    path: Path
    num_samples: int
    sequence_length: int
    channels: tuple[str, ...] = CHANNELS


def make_samples(windows: Samples) -> Samples:
    """Samples [n, 3, length] of `windows` [n, length + 1]: the label of a token is the token after it."""
    inputs, labels = windows[:, :-1], windows[:, 1:]
    return np.stack([inputs, np.ones_like(inputs), labels], axis=1)


def write_sample_file(path: Path, blocks: Iterable[Samples], num_samples: int) -> None:
    """Writes `num_samples` samples [n, channels, length] that arrive in `blocks`."""
    write_datasets(path, ({"data": block} for block in blocks), num_samples)


def write_datasets(
    path: Path,
    blocks: Iterable[Mapping[str, npt.NDArray[Any]]],
    num_samples: int,
    *,
    dtype: str | None = "i4",
    compression: str | None = "gzip",
) -> None:
    """Writes a dataset for each name, [samples, …], and checksums; the same samples become the same bytes.

    Args:
        path: file to write; it appears when it is complete.
        blocks: some samples each, all with the same names.
        num_samples: in all blocks.
        dtype: of all datasets but those of texts; that of the values where absent.
        compression: that HDF5 knows, or none.
    """
    partial = path.with_name(path.name + ".partial")
    packed = {"compression": compression, "shuffle": True} if compression else {}
    if compression == "gzip":
        packed["compression_opts"] = 1
    checksums: dict[str, Checksums] = {}
    with h5py.File(partial, "w") as file:
        file.attrs["n_examples"] = num_samples
        start = 0
        for block in blocks:
            for name, values in block.items():
                if name not in file:
                    shape = values.shape[1:]
                    chunks = (1, *shape) if shape else (num_samples,)
                    kind = h5py.string_dtype() if values.dtype == object else dtype or values.dtype
                    file.create_dataset(name, (num_samples, *shape), kind, chunks=chunks, **packed)
                    checksums[name] = np.zeros(num_samples, dtype=np.uint64)
                stored, end = values.astype(file[name].dtype, copy=False), start + len(values)
                file[name][start:end] = stored
                checksums[name][start:end] = sample_checksums(name, range(start, end), stored)
            start += len(values)
        write_checksums(file, checksums)
    assert start == num_samples, f"{start} samples arrived for a file of {num_samples}"
    partial.rename(path)


def open_sample_file(path: Path) -> h5py.File:
    """The file opened for reading.

    Raises:
        DataError: if it is not an HDF5 file with samples.
    """
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        what = f"HDF5 file does not open: {error}"
        raise DataError(what, where=str(path), remedy="prepare the data again (headwater data)") from error
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
    """How many samples of which length `path` holds.

    Raises:
        DataError: if it is not an HDF5 file with samples.
    """
    with open_sample_file(path) as file:
        num_samples, channels, sequence_length = file["data"].shape
        return SampleFile(path, num_samples, sequence_length, SPAN_CHANNELS[:channels])


def _check_layout(file: h5py.File, path: Path) -> None:
    remedy = f"write int32 [samples, {len(CHANNELS)}, sequence_length] as headwater data does"
    data = file.get("data")
    if "img_path" in file:
        raise DataError(
            "the file holds texts with images, and this model reads texts alone",
            where=str(path),
            remedy="train a model with images on it (LlavaHDF5MapDataProcessor), or name other data",
        )
    if not isinstance(data, h5py.Dataset):
        names = ", ".join(map(repr, file)) or "nothing"
        raise DataError(f"HDF5 file has no dataset 'data', it holds {names}", where=str(path), remedy=remedy)
    if data.ndim != 3 or data.shape[1] not in (len(CHANNELS), len(SPAN_CHANNELS)):
        what = f"dataset 'data' has shape {list(data.shape)}, not [samples, {len(CHANNELS)}, sequence_length]"
        raise DataError(what, where=str(path), remedy=remedy)
    if not np.issubdtype(data.dtype, np.integer):
        raise DataError(f"dataset 'data' holds {data.dtype}, not integers", where=str(path), remedy=remedy)
