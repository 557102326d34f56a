"""Order in which samples are read: pure functions of seed, epoch and position."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import numpy.typing as npt

from headwater.core.batches import equal_share
from headwater.core.errors import DataError
from headwater.core.seeding import derive_seed

Indices = npt.NDArray[np.int64]


def permutation(count: int, seed: int) -> Indices:
    """Return a random order of `range(count)`, the same in every version of numpy.

    It comes from sorting the raw numbers of Philox, because numpy guarantees the numbers of a bit generator,
    but not the results of `shuffle`.
    """
    return np.argsort(np.random.Philox(key=seed).random_raw(count), kind="stable")


def random_generator(seed: int, *keys: int | str) -> np.random.Generator:
    """Return a random generator that depends only on the seed and the keys, such as a purpose and a draw."""
    return np.random.Generator(np.random.Philox(key=derive_seed(seed, *keys)))


@functools.lru_cache(maxsize=4)
def _epoch_order(num_samples: int, seed: int, epoch: int) -> Indices:
    return permutation(num_samples, derive_seed(seed, "samples", epoch))


@dataclasses.dataclass(frozen=True)
class SampleOrder:
    """The order in which samples are read. It decides which samples each batch of each rank holds.

    All epochs form one stream of positions. Global batch k covers the positions
    [k * batch_size, (k + 1) * batch_size) and may span two epochs, so that no sample is ever skipped.
    The order depends neither on the number of ranks nor on the number of workers: a rank takes its slice of
    each global batch.

    Attributes:
        num_samples: samples in an epoch.
        batch_size: samples in a global batch, all ranks together.
        shuffle: read each epoch in a different random order.
        seed: seed of these orders.
        repeat: endless epochs; otherwise one epoch.
        drop_last: without `repeat`, leave out an incomplete last batch.
        rank: index of this rank's slice of each batch.
        world_size: number of ranks.

    Raises:
        ConfigError: if `repeat` is set and `batch_size` cannot be divided among the ranks.
        DataError: if the samples do not fill one batch.
    """

    num_samples: int
    batch_size: int
    shuffle: bool = False
    seed: int = 0
    repeat: bool = True
    drop_last: bool = True
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, "rank must be in range(world_size)"
        if self.repeat:  # in a single pass the ranks may have slices of different sizes
            equal_share(self.batch_size, self.world_size)
        if self.num_samples < self.batch_size and (self.repeat or self.drop_last):
            what = f"too few samples for one batch: batch_size is {self.batch_size}, got {self.num_samples}"
            remedy = f"use a batch_size of at most {self.num_samples}, or prepare more data"
            raise DataError(what, where="batch_size", remedy=remedy)

    @property
    def end(self) -> int | None:
        """Position after the last batch; `None` if epochs repeat."""
        if self.repeat:
            return None
        return self.num_samples - (self.num_samples % self.batch_size if self.drop_last else 0)

    def next_position(self, position: int) -> int | None:
        """Return the end of the batch that begins at `position`; `None` after the last batch."""
        if self.end is None:
            return position + self.batch_size
        return min(position + self.batch_size, self.end) if position < self.end else None

    def draws(self, start: int, stop: int) -> Indices:
        """Return a draw for each of the positions [start, stop) of the stream.

        A draw is `epoch * num_samples + sample`. It is different for every position.
        """
        positions = np.arange(start, stop)
        if not self.shuffle:
            return positions
        epochs, places = np.divmod(positions, self.num_samples)
        draws = epochs * self.num_samples
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            draws[inside] += _epoch_order(self.num_samples, self.seed, int(epoch))[places[inside]]
        return draws

    def local_draws(self, start: int, stop: int) -> Indices:
        """Return this rank's slice of the draws of the global batch [start, stop); slices are about equal."""
        count = stop - start
        first, last = (count * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return self.draws(start + first, start + last)
