"""Data sets, and the sources that make ordered batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headwater.core.batches import fingerprint
from headwater.core.errors import DataError
from headwater.data.loader import Batch, BatchLoader
from headwater.data.order import SampleOrder


class Samples(Protocol):
    """A data set whose samples are read by number."""

    @property
    def sequence_length(self) -> int | None:
        """Tokens per sample; `None` if samples are not made of tokens."""
        ...

    def __len__(self) -> int: ...

    def __getitems__(self, draws: Sequence[int], /) -> Batch | DataError:
        """Return the batch of these draws. An error is returned, not raised (see `BatchLoader`).

        Args:
            draws: draw `d` is sample `d % len(self)`. All random choices for it, such as masks, depend only
                on `d`. They therefore differ between epochs, but not between ranks or workers.
        """
        ...


class SampleSource:
    """A data set with an order and a loader: one dataloader section of a params file.

    Args:
        samples: the data set.
        batch_size: samples in a global batch, all ranks together.
        shuffle: read each epoch in a different random order.
        seed: seed of these orders.
        repeat: endless epochs, for training; otherwise each iteration is one pass.
        drop_last: in a single pass, leave out an incomplete last batch.
        num_workers: worker processes of each rank; 0: read in this process.
        prefetch_factor: batches that each worker reads ahead.
        persistent_workers: keep the workers from one pass to the next.
        rank: index of this process's slice of each global batch.
        world_size: number of ranks.

    Raises:
        ConfigError: if `batch_size` cannot be divided among the ranks.
        DataError: if there are too few samples.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        repeat: bool = True,
        drop_last: bool = True,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        persistent_workers: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.samples = samples
        self.order = SampleOrder(
            num_samples=len(samples),
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            repeat=repeat,
            drop_last=drop_last,
            rank=rank,
            world_size=world_size,
        )
        self._workers = (num_workers, prefetch_factor, persistent_workers)

    @property
    def num_samples(self) -> int:
        """Samples in one pass."""
        return len(self.samples)

    @property
    def sequence_length(self) -> int | None:
        """Tokens per sample; `None` if samples are not made of tokens."""
        return self.samples.sequence_length

    def fingerprint(self) -> str:
        """Return a text that identifies the data set: its number of samples and a hash of three of them."""
        last = len(self.samples) - 1
        some = self.samples.__getitems__([0, last // 2, last])
        mark = 0 if isinstance(some, DataError) else fingerprint(some)
        return f"{len(self.samples)} samples ({mark:08x})"

    def create_dataloader(self) -> BatchLoader:
        """Return a loader of this rank's batches of `batch_size / world_size` samples."""
        num_workers, prefetch_factor, persistent_workers = self._workers
        return BatchLoader(
            self.samples,
            self.order,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
