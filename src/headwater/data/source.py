"""From samples that can be read by number to batches in an order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headwater.core.batches import fingerprint
from headwater.core.errors import DataError
from headwater.data.loader import Batch, BatchLoader
from headwater.data.order import SampleOrder


class Samples(Protocol):
    """A data set."""

    @property
    def sequence_length(self) -> int | None:
        """Tokens of a sample; `None` where it is not made of tokens."""
        ...

    def __len__(self) -> int: ...

    def __getitems__(self, draws: Sequence[int], /) -> Batch | DataError:
        """The batch of these samples; an error is given, not raised (see `BatchLoader`).

        Args:
            draws: sample `d % len(self)` for each `d`; what is random in it depends on `d` alone, so that it
                is another one in the next pass, and the same whoever reads it.
        """
        ...


class SampleSource:
    """The samples of a data section of a params file.

    Args:
        samples: the data set.
        batch_size: samples in a global batch, all ranks together.
        shuffle: whether each pass has a random order of its own.
        seed: seed of these orders.
        repeat: endless passes, for training; otherwise each iteration is one pass.
        drop_last: in a single pass, whether an incomplete last batch is left out.
        num_workers: worker processes of each rank; 0 reads in this process.
        prefetch_factor: batches that each worker reads ahead.
        persistent_workers: keep the workers from one pass to the next.
        rank: which slice of each global batch is this process's, of `world_size`.
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
        """Tokens of a sample; `None` where it is not made of tokens."""
        return self.samples.sequence_length

    def fingerprint(self) -> str:
        """Tells data sets apart: how many samples there are, and what some of them hold."""
        last = len(self.samples) - 1
        some = self.samples.__getitems__([0, last // 2, last])
        mark = 0 if isinstance(some, DataError) else fingerprint(some)
        return f"{len(self.samples)} samples ({mark:08x})"

    def create_dataloader(self) -> BatchLoader:
        """Batches of `batch_size / world_size` samples."""
        num_workers, prefetch_factor, persistent_workers = self._workers
        return BatchLoader(
            self.samples,
            self.order,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
