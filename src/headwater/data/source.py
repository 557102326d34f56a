"""Data sets, and the sources that make ordered batches of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headwater.core.batches import fingerprint
from headwater.core.errors import DataError
from headwater.data.loader import Batch, BatchLoader, Workers
from headwater.data.order import SampleOrder


class Samples(Protocol):
    """A data set whose samples are read by number."""

    @property
    def sequence_length(self) -> int | None:
        """Tokens per sample; `None` if samples are not made of tokens."""
        ...

    def __len__(self) -> int: ...

    def __getitems__(self, draws: Sequence[int], /) -> Batch | DataError:
        """Return the batch of `draws`, or an error. The error is not raised here (see `BatchLoader`).

        Args:
            draws: draw `d` is sample `d % len(self)`. All random choices for it, such as masks, depend only
                on `d`. They therefore differ between epochs, but not between ranks or workers.
        """
        ...


class SampleSource:
    """The content of a dataloader section of a params file: a data set, its order, and its workers.

    Args:
        samples: the data set.
        order: decides which samples each batch of this rank holds.
        workers: the processes that read.
    """

    def __init__(self, samples: Samples, order: SampleOrder, workers: Workers) -> None:
        assert order.num_samples == len(samples), "the order is one of these samples"
        self.samples, self.order, self._workers = samples, order, workers

    @property
    def num_samples(self) -> int:
        """Samples in one pass."""
        return len(self.samples)

    @property
    def sequence_length(self) -> int | None:
        """Tokens per sample; `None` if samples are not made of tokens."""
        return self.samples.sequence_length

    def fingerprint(self) -> str:
        """Return a text to recognize the data set: its number of samples and a hash of three of them."""
        last = len(self.samples) - 1
        some = self.samples.__getitems__([0, last // 2, last])
        mark = 0 if isinstance(some, DataError) else fingerprint(some)
        return f"{len(self.samples)} samples ({mark:08x})"

    def create_dataloader(self) -> BatchLoader:
        """Return a loader of this rank's batches of `batch_size / world_size` samples."""
        return BatchLoader(self.samples, self.order, self._workers)
