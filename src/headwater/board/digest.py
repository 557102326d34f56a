"""Small summaries of long histories: the least and the greatest value of each series in ranges of steps."""

from __future__ import annotations

import dataclasses
from typing import final

import numpy as np
import numpy.typing as npt

SERIES = ("loss", "learning_rate", "gradient_norm", "rate", "memory")
"""The series of a run: the rows of all arrays of values in this module."""

_BUCKETS = 2048

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Bands:
    """The values of some steps, summarized in buckets. Only buckets with at least one step are listed.

    Attributes:
        steps: [buckets], a step of each bucket; ascending.
        low: [series, buckets], the least finite value of each bucket; NaN if all values are NaN or
            infinite.
        high: [series, buckets], the greatest one.
    """

    steps: Ints
    low: Floats
    high: Floats


@final
class Digest:
    """The least and greatest values of the series of one run, in buckets of equally many steps.

    The number of buckets is fixed, so the memory of a digest does not depend on the length of the run. If a
    step lies beyond the last bucket, pairs of buckets are merged and the buckets become twice as wide. No
    extreme value is lost by this.

    Args:
        buckets: number of buckets; even.
    """

    def __init__(self, buckets: int = _BUCKETS) -> None:
        self._width = 1
        self._steps = np.zeros(buckets, np.int64)  # 0: the bucket is empty, since steps count from 1
        self._low = np.full((len(SERIES), buckets), np.inf)
        self._high = np.full((len(SERIES), buckets), -np.inf)

    def add(self, steps: Ints, values: Floats) -> None:
        """Add steps.

        Args:
            steps: [n], numbers of steps, at least 1; in any order.
            values: [series, n], the values of these steps. Values that are not finite are left out.
        """
        if not len(steps):
            return
        while int(steps.max()) > self._width * len(self._steps):
            self._widen()
        places = (steps - 1) // self._width
        self._steps[places] = steps
        finite = np.isfinite(values)
        low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
        # Not one call for all series: `at` is fast for arrays of one dimension only.
        for row in range(len(SERIES)):
            np.minimum.at(self._low[row], places, low[row])
            np.maximum.at(self._high[row], places, high[row])

    def bands(self, count: int) -> Bands:
        """Return the values in at most `count` buckets (at least 1) of equal width."""
        used = np.flatnonzero(self._steps)
        if not len(used):
            return Bands(self._steps[:0], self._low[:, :0], self._high[:, :0])
        share = -(-(int(used[-1]) + 1) // count)
        # Each group begins at the first used bucket of a range of `share` buckets.
        starts = np.flatnonzero(np.diff(used // share, prepend=-1))
        low = np.minimum.reduceat(self._low[:, used], starts, axis=1)
        high = np.maximum.reduceat(self._high[:, used], starts, axis=1)
        # The last step of a group: the end of the run is then at its true place.
        last = np.append(starts[1:], len(used)) - 1
        empty = low > high
        return Bands(self._steps[used[last]], np.where(empty, np.nan, low), np.where(empty, np.nan, high))

    def _widen(self) -> None:
        """Merge pairs of buckets: each bucket then has twice as many steps."""
        half = len(self._steps) // 2
        self._width *= 2
        self._steps[:half] = self._steps.reshape(half, 2).max(axis=1)
        self._low[:, :half] = self._low.reshape(len(SERIES), half, 2).min(axis=2)
        self._high[:, :half] = self._high.reshape(len(SERIES), half, 2).max(axis=2)
        self._steps[half:], self._low[:, half:], self._high[:, half:] = 0, np.inf, -np.inf
