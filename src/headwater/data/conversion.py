"""Data sets of the Hugging Face library, of PyTorch, or any iterable, as HDF5 files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, IterableDataset

from headwater.core.errors import ConfigError, DataError
from headwater.data.sample_file import CHANNELS, SPAN_CHANNELS, write_datasets
from headwater.data.staging import staged_folder

Fields = dict[str, npt.NDArray[Any]]

_IGNORED = -100
"""Label of the transformers library for a position that does not count."""


def convert_dataset_to_HDF5(
    dataset: Iterable[Any],
    output_dir: str | Path = "./hdf5_dataset/",
    name: str = "dataset-partition",
    samples_per_file: int = 2000,
    num_workers: int = 0,
    batch_size: int = 64,
    data_collator: Callable[[list[Any]], Mapping[str, Any]] | None = None,
    dtype: str = "i4",
    compression: str | None = "gzip",
) -> int:
    """Writes what a data set gives to HDF5 files, and returns the number of samples.

    Samples of `input_ids`, maybe with `attention_mask` and `labels`, become rows `data` [samples, 3, length],
    which `GptHDF5DataProcessor` reads; with `attention_span` and `position_ids` there are 5 rows. Where the
    labels are the tokens themselves, as collators of the transformers library give them, or absent, they are
    moved by one, for the label of a token is the token after it; labels of -100 do not count in the loss.
    Samples of other fields become a dataset each.

    Args:
        dataset: gives samples, mappings from names to numbers; a generator is read once.
        output_dir: folder to make.
        name: begin of the files' names.
        samples_per_file: samples in each file but the last.
        num_workers: processes that read ahead, where the data set can be indexed.
        batch_size: samples that are collated at once.
        data_collator: samples to a mapping of arrays or tensors [samples, …]; stacks them where absent.
        dtype: of the files' numbers.
        compression: that HDF5 knows, or none.

    Raises:
        ConfigError: for a number below 1.
        DataError: if there are no samples, they cannot be stacked, or the folder has content.
    """
    for key, value in (("samples_per_file", samples_per_file), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"{key} is {value}", where=key, remedy="write a whole number above 0")
    indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    loader: DataLoader[Any] = DataLoader(
        dataset if indexed else _Stream(dataset),  # type: ignore[arg-type]
        batch_size=batch_size,
        collate_fn=data_collator or _stacked,
        num_workers=num_workers if indexed else 0,
    )
    total = 0
    with staged_folder(Path(output_dir)) as folder:
        for number, fields in enumerate(_parts(map(_as_rows, loader), samples_per_file)):
            count = len(next(iter(fields.values())))
            path = folder / f"{name}-{number:05d}.h5"
            write_datasets(path, [fields], count, dtype=dtype, compression=compression)
            total += count
        if not total:
            raise DataError("the data set gives no samples", remedy="look at the data set")
    return total


class _Stream(IterableDataset[Any]):
    """An iterable as a data set."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


def _stacked(samples: Sequence[Mapping[str, Any]]) -> Fields:
    fields = {}
    for name in samples[0]:
        values = [np.asarray(sample[name]) for sample in samples]
        shapes = {value.shape for value in values}
        if len(shapes) > 1 or values[0].dtype.kind not in "biuf":
            raise DataError(
                f"{name!r} cannot be stacked: shapes {sorted(shapes)[:3]}, kind {values[0].dtype}",
                remedy="give a data_collator that fills samples up, and leave out what is not a number",
            )
        fields[name] = np.stack(values)
    return fields


def _as_rows(batch: Mapping[str, Any]) -> Fields:
    """Fields of some samples; rows for a decoder as the one field `data`."""
    fields = {name: np.asarray(values) for name, values in batch.items()}
    channels = next((c for c in (CHANNELS, SPAN_CHANNELS) if set(fields) == set(c)), None)
    if set(fields) <= set(CHANNELS) and "input_ids" in fields:
        channels = CHANNELS
        fields = _next_tokens(fields)
    if channels is None or len({fields[name].shape for name in channels}) > 1:
        return fields
    return {"data": np.stack([fields[name] for name in channels], axis=1)}


def _next_tokens(fields: Fields) -> Fields:
    """Tokens, what counts in the loss, and for each token the one after it."""
    tokens = fields["input_ids"]
    mask = fields.get("attention_mask", np.ones_like(tokens))
    labels = fields.get("labels", np.where(mask == 1, tokens, _IGNORED))
    counted = labels != _IGNORED
    if (labels == tokens)[counted].all():
        labels = np.concatenate([labels[:, 1:], np.full_like(labels[:, :1], _IGNORED)], axis=1)
        mask = np.ones_like(tokens)  # padding before the last token has a label of its own
        counted = labels != _IGNORED
    return {
        "input_ids": tokens,
        "attention_mask": np.where(counted, mask, 0),
        "labels": np.where(counted, labels, 0),
    }


def _parts(batches: Iterable[Fields], size: int) -> Iterator[Fields]:
    """The same samples, `size` of them at a time."""
    held: Fields = {}
    for batch in batches:
        if held and set(held) != set(batch):
            raise DataError(
                f"samples have the fields {', '.join(batch)}, others {', '.join(held)}",
                remedy="give every sample the same fields",
            )
        held = {name: np.concatenate([held[name], batch[name]]) if held else batch[name] for name in batch}
        while len(next(iter(held.values()))) >= size:
            yield {name: values[:size] for name, values in held.items()}
            held = {name: values[size:] for name, values in held.items()}
    if held and len(next(iter(held.values()))):
        yield held
