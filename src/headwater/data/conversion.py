"""Conversion of Hugging Face data sets, PyTorch data sets and other iterables to HDF5 files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, IterableDataset

from headwater.core.batches import IGNORED
from headwater.core.errors import ConfigError, DataError
from headwater.data.sample_file import CHANNELS, SPAN_CHANNELS, write_datasets
from headwater.data.staging import staged_folder

Fields = dict[str, npt.NDArray[Any]]


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
    """Write the samples of a data set to HDF5 files and return their number.

    Samples with `input_ids`, and optionally `attention_mask` and `labels`, become one dataset `data`
    [samples, 3, length], which `GptHDF5DataProcessor` reads. With `attention_span` and `position_ids` its
    shape is [samples, 5, length]. If the labels are absent, or equal to the tokens (as collators of the
    transformers library return them), they are shifted by one, because here the label of a token is the token
    after it. Labels of -100 do not count in the loss. Other fields become one dataset each.

    Args:
        dataset: an iterable of samples. A sample is a mapping from names to numbers or arrays of numbers.
        output_dir: folder to create.
        name: prefix of the file names.
        samples_per_file: samples in each file except the last.
        num_workers: processes that read ahead; used only if the data set can be indexed.
        batch_size: samples that are collated at once.
        data_collator: turns a list of samples into a mapping from names to arrays or tensors [samples, …]. By
            default the values of each field are stacked.
        dtype: dtype of the numbers in the files.
        compression: name of an HDF5 compression filter, or `None`.

    Returns:
        The number of samples.

    Raises:
        ConfigError: if `samples_per_file` or `batch_size` is below 1.
        DataError: if the data set is empty, its samples cannot be stacked, or the folder is not empty.
    """
    for key, value in (("samples_per_file", samples_per_file), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"expected {key} of at least 1, got {value}", where=key, remedy="use 1 or more")
    batches = map(_as_rows, _loader(dataset, batch_size, num_workers, data_collator or _stacked))
    total = 0
    with staged_folder(Path(output_dir)) as folder:
        for number, fields in enumerate(_parts(batches, samples_per_file)):
            count = len(next(iter(fields.values())))
            path = folder / f"{name}-{number:05d}.h5"
            write_datasets(path, [fields], count, dtype=dtype, compression=compression)
            total += count
        if not total:
            raise DataError(
                "the data set yields no samples", remedy="pass a data set with at least one sample"
            )
    return total


def _loader(
    dataset: Iterable[Any],
    batch_size: int,
    num_workers: int,
    collate: Callable[[list[Any]], Mapping[str, Any]],
) -> Iterable[Mapping[str, Any]]:
    """Return the collated batches of a data set. Workers read ahead if it can be indexed."""
    indexed = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    return DataLoader(
        dataset if indexed else _Stream(dataset),  # type: ignore[arg-type]
        batch_size=batch_size,
        collate_fn=collate,
        # Each worker would read the whole iterable, so each sample would occur once per worker.
        num_workers=num_workers if indexed else 0,
    )


class _Stream(IterableDataset[Any]):
    """An iterable wrapped as a PyTorch data set."""

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
                f"values of {name!r} cannot be stacked: shapes {sorted(shapes)[:3]}, dtype {values[0].dtype}",
                remedy="pass a data_collator that pads samples to one length and keeps only numbers",
            )
        fields[name] = np.stack(values)
    return fields


def _as_rows(batch: Mapping[str, Any]) -> Fields:
    """Return a batch as arrays by name. The fields of a decoder are stacked in one array, `data`."""
    fields = {name: np.asarray(values) for name, values in batch.items()}
    channels = next((c for c in (CHANNELS, SPAN_CHANNELS) if set(fields) == set(c)), None)
    if set(fields) <= set(CHANNELS) and "input_ids" in fields:
        channels = CHANNELS
        fields = _next_tokens(fields)
    if channels is None or len({fields[name].shape for name in channels}) > 1:
        return fields
    return {"data": np.stack([fields[name] for name in channels], axis=1)}


def _next_tokens(fields: Fields) -> Fields:
    """Return `input_ids`, `attention_mask` (1: counts in the loss) and `labels` (the next token of each)."""
    tokens = fields["input_ids"]
    mask = fields.get("attention_mask", np.ones_like(tokens))
    labels = fields.get("labels", np.where(mask == 1, tokens, IGNORED))
    counted = labels != IGNORED
    if (labels == tokens)[counted].all():
        labels = np.concatenate([labels[:, 1:], np.full_like(labels[:, :1], IGNORED)], axis=1)
        mask = np.ones_like(tokens)  # after the shift, a masked position may have a label that counts
        counted = labels != IGNORED
    return {
        "input_ids": tokens,
        "attention_mask": np.where(counted, mask, 0),
        "labels": np.where(counted, labels, 0),
    }


def _parts(batches: Iterable[Fields], size: int) -> Iterator[Fields]:
    """Yield the samples of `batches` in batches of `size`; the last batch may be smaller."""
    held: Fields = {}
    for batch in batches:
        if held and set(held) != set(batch):
            raise DataError(
                f"some samples have the fields {', '.join(held)}, others {', '.join(batch)}",
                remedy="use the same fields in every sample",
            )
        held = {name: np.concatenate([held[name], batch[name]]) if held else batch[name] for name in batch}
        while len(next(iter(held.values()))) >= size:
            yield {name: values[:size] for name, values in held.items()}
            held = {name: values[size:] for name, values in held.items()}
    if held and len(next(iter(held.values()))):
        yield held
