"""In which order samples are read: pure functions of seed, epoch and position."""

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
    """A random order of `range(count)`, the same with every version of numpy.

    Sorts Philox's raw numbers: numpy fixes what a bit generator draws, not what `shuffle` makes of it.
    """
    return np.argsort(np.random.Philox(key=seed).random_raw(count), kind="stable")


@functools.lru_cache(maxsize=4)
def _epoch_order(num_samples: int, seed: int, epoch: int) -> Indices:
    return permutation(num_samples, derive_seed(seed, "samples", epoch))


@dataclasses.dataclass(frozen=True)
class SampleOrder:
    """Which samples each batch of each rank holds.

    Epochs follow each other in one stream of positions; global batch k is positions
    [k * batch_size, (k + 1) * batch_size) and may span two epochs, so that no sample is ever skipped.
    Neither the number of ranks nor of workers plays a part in it: a rank takes its slice of each batch.

    Attributes:
        num_samples: samples in an epoch.
        batch_size: samples in a global batch, all ranks together.
        shuffle: whether each epoch has a random order of its own.
        seed: seed of these orders.
        repeat: endless epochs; otherwise one.
        drop_last: without `repeat`, whether an incomplete last batch is left out.
        rank: which slice of each batch is taken, of `world_size`.
        world_size: number of ranks.
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
        assert 0 <= self.rank < self.world_size, "rank lies in range(world_size)"
        if self.repeat:  # in one pass parts need not be equal
            equal_share(self.batch_size, self.world_size)
        if self.num_samples < self.batch_size and (self.repeat or self.drop_last):
            what = f"too few samples for one batch: {self.num_samples}, and batch_size is {self.batch_size}"
            remedy = f"write a batch_size of at most {self.num_samples}, or prepare more text"
            raise DataError(what, where="batch_size", remedy=remedy)

    @property
    def end(self) -> int | None:
        """Position after the last batch; none where epochs repeat."""
        if self.repeat:
            return None
        return self.num_samples - (self.num_samples % self.batch_size if self.drop_last else 0)

    def next_position(self, position: int) -> int | None:
        """Where the batch that begins at `position` ends; none if there is no such batch."""
        if self.end is None:
            return position + self.batch_size
        return min(position + self.batch_size, self.end) if position < self.end else None

    def samples(self, start: int, stop: int) -> Indices:
        """Sample numbers at the positions [start, stop) of the stream."""
        return self.draws(start, stop) % self.num_samples

    def draws(self, start: int, stop: int) -> Indices:
        """Epoch and sample at the positions [start, stop) of the stream as one number each.

        It is `epoch * num_samples + sample`: no two positions have the same.
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
        """This rank's draws of the global batch at [start, stop); sizes differ by one at most."""
        count = stop - start
        first, last = (count * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return self.draws(start + first, start + last)

    def local_batch(self, start: int, stop: int) -> Indices:
        """The same as sample numbers."""
        return self.local_draws(start, stop) % self.num_samples
