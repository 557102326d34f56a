"""Reader of GPT samples in HDF5 files: turns a dataloader section of a params file into batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt
from torch.utils.data import Dataset

from headwater.core.errors import DataError
from headwater.core.names import nearest_sibling
from headwater.data.file_index import FileIndex
from headwater.data.loader import Batch, Workers
from headwater.data.open_files import OpenFiles
from headwater.data.order import SampleOrder
from headwater.data.sample_file import (
    CHANNELS,
    SPAN_CHANNELS,
    SampleFile,
    check_sample_file,
    open_sample_file,
)
from headwater.data.source import SampleSource
from headwater.data.statistics import read_statistics

_TOKEN_CHANNELS = slice(CHANNELS.index("input_ids"), CHANNELS.index("labels") + 1, CHANNELS.index("labels"))
"""The channels that hold tokens."""


class GptHDF5DataProcessorConfig(BaseModel):
    """Keys of a dataloader section of a params file.

    Attributes:
        data_processor: name of the reader.
        data_dir: folder of HDF5 files, or a list of such folders.
        batch_size: samples in a global batch, all ranks together.
        shuffle: read each epoch in a different random order.
        shuffle_seed: seed of these orders.
        num_workers: worker processes of each rank; 0: read in the training process.
        prefetch_factor: batches that each worker reads ahead.
        persistent_workers: keep the workers from one pass to the next.
        drop_last: in a single pass, leave out an incomplete last batch.
        repeat: endless epochs, for training; otherwise each iteration is one pass.
        max_sequence_length: required length of the samples in tokens.
        vocab_size: all token ids must be below this number.
        use_vsl: require samples with `attention_span` and `position_ids`, which keep packed texts apart.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    data_processor: Literal["GptHDF5DataProcessor", "GptHDF5MapDataProcessor"] = "GptHDF5DataProcessor"
    data_dir: Path | Annotated[list[Path], Field(min_length=1)]
    batch_size: PositiveInt
    shuffle: bool = False
    shuffle_seed: int = 0
    num_workers: NonNegativeInt = 0
    prefetch_factor: PositiveInt = 10
    persistent_workers: bool = True
    drop_last: bool = True
    repeat: bool = True
    max_sequence_length: PositiveInt | None = None
    vocab_size: PositiveInt | None = None
    use_vsl: bool = False

    @property
    def folders(self) -> list[Path]:
        return self.data_dir if isinstance(self.data_dir, list) else [self.data_dir]


class GptHDF5DataProcessor(SampleSource):
    """A data set of GPT samples, checked against its configuration and the model.

    A batch has `input_ids`, `attention_mask` (1 where a position counts in the loss) and `labels`, each int64
    [batch_size / world_size, sequence_length]. If a sample packs several texts that do not attend to each
    other, a batch also has `attention_span` and `position_ids` of the same shape.

    Args:
        config: keys of the dataloader section.
        rank: index of this process's slice of each global batch.
        world_size: number of ranks.
        vocab_size: vocabulary of the model; the smaller of this and `config.vocab_size` applies.
        max_position_embeddings: maximum length of a sample that the model can read.

    Raises:
        ConfigError: if `batch_size` cannot be divided among the ranks.
        DataError: if the files are missing, malformed or do not fit the model.
    """

    def __init__(
        self,
        config: GptHDF5DataProcessorConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
        vocab_size: int | None = None,
        max_position_embeddings: int | None = None,
    ) -> None:
        self.config = config
        limits = [size for size in (config.vocab_size, vocab_size) if size is not None]
        self.dataset = open_samples(
            config.folders,
            vocab_size=min(limits, default=None),
            sequence_length=config.max_sequence_length,
            max_position_embeddings=max_position_embeddings,
            spans=config.use_vsl,
        )
        order = SampleOrder(
            len(self.dataset),
            config.batch_size,
            shuffle=config.shuffle,
            seed=config.shuffle_seed,
            repeat=config.repeat,
            drop_last=config.drop_last,
            rank=rank,
            world_size=world_size,
        )
        workers = Workers(config.num_workers, config.prefetch_factor, config.persistent_workers)
        super().__init__(self.dataset, order, workers)


GptHDF5MapDataProcessor = GptHDF5DataProcessor


def open_samples(
    folders: Sequence[Path],
    *,
    vocab_size: int | None = None,
    sequence_length: int | None = None,
    max_position_embeddings: int | None = None,
    sinks: Sequence[int] = (),
    spans: bool = False,
) -> GptSamples:
    """Check the HDF5 files of some folders and return their samples as one data set.

    Args:
        folders: folders of HDF5 files.
        vocab_size: all token ids must be below this number.
        sequence_length: required length of the samples in tokens.
        max_position_embeddings: maximum length of a sample with its sink tokens.
        sinks: ids of the tokens to put before each sample; they do not count in the loss.
        spans: require the channels that keep packed texts apart (`SPAN_CHANNELS`).

    Raises:
        DataError: if the files are missing, malformed or do not fit.
    """
    files = [check_sample_file(path) for folder in folders for path in _hdf5_files(folder)]
    room = None if max_position_embeddings is None else max_position_embeddings - len(sinks)
    _check_lengths(files, sequence_length, room)
    _check_channels(files, spans=spans, sinks=bool(sinks))
    return GptSamples(files, vocab_size=vocab_size, sinks=sinks)


class GptSamples(Dataset[Any]):
    """The samples of several files as one data set. Each process opens the files that it reads.

    Args:
        files: files whose samples have the same length.
        vocab_size: all token ids must be below this number; checked when samples are read.
        sinks: ids of the tokens to put before each sample; they do not count in the loss.
    """

    def __init__(
        self, files: Sequence[SampleFile], *, vocab_size: int | None = None, sinks: Sequence[int] = ()
    ) -> None:
        self.files = list(files)
        self.vocab_size = vocab_size
        self.channels = self.files[0].channels
        # The mask and label channels of sink tokens stay 0: the loss ignores them.
        self._sinks = np.zeros((len(self.channels), len(sinks)), dtype=np.int64)
        self._sinks[0] = sinks
        self._index = FileIndex(file.num_samples for file in files)
        self._open_files = OpenFiles(open_sample_file)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def sequence_length(self) -> int:
        """Tokens per sample, with its sink tokens."""
        return self.files[0].sequence_length + int(self._sinks.shape[1])

    def __getitems__(self, draws: Sequence[int]) -> Batch | DataError:
        """Return the batch of these draws (numbers of samples; see `headwater.data.source.Samples`)."""
        samples = np.empty((len(draws), len(self.channels), self.sequence_length), dtype=np.int64)
        sinks = self._sinks.shape[1]
        samples[..., :sinks] = self._sinks
        try:
            places = [self._place(draw) for draw in draws]
            samples[..., sinks:] = self._read(places)
            self._check_tokens(samples[..., sinks:], places)
        except DataError as error:
            return error
        # The channels are copied: for a view, a worker would send the memory of all channels.
        return {
            name: torch.from_numpy(samples[:, channel].copy()) for channel, name in enumerate(self.channels)
        }

    def _place(self, draw: int) -> tuple[SampleFile, int]:
        """Return the file of a sample, and the sample's number in it."""
        number, place = self._index.find(draw % len(self))
        return self.files[number], place

    def _read(self, places: Sequence[tuple[SampleFile, int]]) -> npt.NDArray[Any]:
        """Return the samples at `places` [places, channels, length], each compared with its checksum."""
        values = [self._open_files[file.path].read_unchecked("data", place) for file, place in places]
        rows_by_file: dict[Path, list[int]] = {}
        for row, (file, _) in enumerate(places):
            rows_by_file.setdefault(file.path, []).append(row)
        # One comparison for all samples of a file is faster than one for each sample.
        for path, rows in rows_by_file.items():
            stacked = np.stack([values[row] for row in rows])
            self._open_files[path].verify("data", [places[row][1] for row in rows], stacked)
        return stacked if len(rows_by_file) == 1 else np.stack(values)

    def _check_tokens(self, samples: npt.NDArray[np.int64], places: Sequence[tuple[SampleFile, int]]) -> None:
        """Check that all tokens of a batch [batch, channels, length] are in the vocabulary.

        Raises:
            DataError: if a token is not in the vocabulary; the error names the sample.
        """
        tokens = samples[:, _TOKEN_CHANNELS]
        low, high = tokens.min(), tokens.max()
        if low >= 0 and (self.vocab_size is None or high < self.vocab_size):
            return
        for row, (file, place) in zip(tokens, places, strict=True):
            self._check_range(int(row.min()), int(row.max()), file.path, place)

    def _check_range(self, low: int, high: int, path: Path, sample: int) -> None:
        where = f"{path}, sample {sample}"
        if low < 0:
            raise DataError(
                f"expected token ids of at least 0, got {low}", where=where, remedy="prepare the data again"
            )
        if self.vocab_size is not None and high >= self.vocab_size:
            what = f"expected token ids below vocab_size={self.vocab_size}, got {high}"
            needed = max(high + 1, _prepared_vocabulary(path))
            remedy = f"set vocab_size to at least {needed}, or use data made with the model's tokenizer"
            raise DataError(what, where=where, remedy=remedy)


def _prepared_vocabulary(path: Path) -> int:
    """Return the vocabulary with which `headwater data` wrote the file at `path`; 0 if that is unknown."""
    # The remedy names the whole vocabulary, because a later sample may have a larger token id.
    try:
        return read_statistics(path.parent.parent).vocab_size
    except (DataError, OSError):
        return 0


def _check_channels(files: Sequence[SampleFile], *, spans: bool, sinks: bool) -> None:
    first = files[0]
    for file in files:
        if file.channels != first.channels:
            raise DataError(
                f"samples have {len(file.channels)} channels, but {len(first.channels)} in {first.path}",
                where=str(file.path),
                remedy="prepare all data with --use_vsl, or all data without it",
            )
    if spans and first.channels != SPAN_CHANNELS:
        raise DataError(
            "use_vsl is set, but the samples have no attention_span and position_ids",
            where=str(first.path),
            remedy="prepare the data with --use_vsl, or remove use_vsl",
        )
    if sinks and first.channels == SPAN_CHANNELS:
        raise DataError(
            "sink tokens do not work with packed texts (use_vsl): only the first text could attend to them",
            where=str(first.path),
            remedy="remove data_transforms, or prepare the data without --use_vsl",
        )


def _hdf5_files(folder: Path) -> list[Path]:
    """Return the HDF5 files of `folder`, sorted by name.

    Raises:
        DataError: if the folder does not exist or has no such files.
    """
    if folder.is_file():
        remedy = f"write the folder that holds it: {folder.parent}"
        raise DataError("data_dir is a file, expected a folder", where=f"data_dir: {folder}", remedy=remedy)
    if not folder.is_dir():
        near = nearest_sibling(folder)
        out = folder.parent if folder.name in ("train", "val") else "DIR"
        remedy = (
            f"did you mean {near}?"
            if near
            else f"name another folder, or create it: headwater data INPUT --out {out}"
        )
        raise DataError("data_dir does not exist", where=f"data_dir: {folder}", remedy=remedy)
    # Systems write hidden files beside others, such as `._name` on macOS.
    visible = (path for path in folder.iterdir() if not path.name.startswith("."))
    files = sorted(path for path in visible if path.suffix in (".h5", ".hdf5"))
    if not files:
        remedy = "name the folder that holds the .h5 files, for example DIR/train"
        if (folder / "train").is_dir():
            remedy = f"write data_dir: {folder / 'train'}"
        raise DataError("data_dir holds no HDF5 files", where=f"data_dir: {folder}", remedy=remedy)
    return files


def _check_lengths(
    files: Sequence[SampleFile], expected: int | None, max_position_embeddings: int | None
) -> None:
    first = files[0]
    for file in files:
        if file.sequence_length != first.sequence_length:
            what = f"samples have {file.sequence_length} tokens, but {first.sequence_length} in {first.path}"
            remedy = "prepare all data with the same --sequence_length"
            raise DataError(what, where=str(file.path), remedy=remedy)
    length = first.sequence_length
    if expected is not None and length != expected:
        what = f"samples have {length} tokens, but max_sequence_length is {expected}"
        remedy = f"prepare the data with --sequence_length {expected}, or set max_sequence_length: {length}"
        raise DataError(what, where=str(first.path), remedy=remedy)
    if max_position_embeddings is not None and length > max_position_embeddings:
        what = (
            f"samples have {length} tokens, but the model reads at most {max_position_embeddings} "
            "(max_position_embeddings)"
        )
        remedy = (
            f"prepare the data with --sequence_length {max_position_embeddings}, "
            f"or set max_position_embeddings: {length}"
        )
        raise DataError(what, where=str(first.path), remedy=remedy)
    if not any(file.num_samples for file in files):
        raise DataError(
            "data_dir holds no samples",
            where=str(first.path.parent),
            remedy="prepare more text, or samples with a smaller --sequence_length",
        )
