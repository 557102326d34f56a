"""Mixture of several data sets, each with a fraction of the samples."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from headwater.core.errors import DataError
from headwater.data.loader import Batch
from headwater.data.source import Samples


class Mixture:
    """A data set of evenly mixed samples of several sources.

    The draw alone decides the source and the sample in the source. A pass has as many samples as all sources
    together. If a source has fewer samples than its fraction of a pass, it starts again within the pass. If
    it has more, the next pass continues with the remaining samples.

    Args:
        sources: data sets whose samples have the same length.
        weights: weight of each source; their sum need not be 1.

    Raises:
        DataError: if the samples differ in length.
    """

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float]) -> None:
        self.sources = list(sources)
        lengths = [source.sequence_length for source in sources]
        if len(set(lengths)) != 1:
            raise DataError(
                f"samples of a mixture must have the same length, got {', '.join(map(str, lengths))} tokens",
                where="mixture",
                remedy="prepare all data with the same --sequence_length",
            )
        total = sum(map(len, sources))
        # The ends are rounded instead of the counts. Otherwise the counts might not add up to `total`.
        ends = np.rint(np.cumsum(weights) / sum(weights) * total).astype(np.int64)
        self._counts = np.diff(ends, prepend=0)
        self._starts = ends - self._counts

    @property
    def sequence_length(self) -> int | None:
        """Tokens per sample."""
        return self.sources[0].sequence_length

    def __len__(self) -> int:
        return int(self._counts.sum())

    def __getitems__(self, draws: Sequence[int]) -> Batch | DataError:
        """Return the batch of these draws (numbers of samples; see `headwater.data.source.Samples`)."""
        numbers, inside = self.find(np.asarray(draws, dtype=np.int64))
        rows: dict[int, dict[str, torch.Tensor]] = {}
        for number in np.unique(numbers):
            places = np.flatnonzero(numbers == number)
            batch = self.sources[number].__getitems__(inside[places].tolist())
            if isinstance(batch, DataError):
                return batch
            for row, place in enumerate(places):
                rows[int(place)] = {name: values[row] for name, values in batch.items()}
        return {name: torch.stack([rows[place][name] for place in range(len(draws))]) for name in rows[0]}

    def check(self) -> None:
        """Raise if a source has no sample in a pass, or samples of different sources have different fields.

        Raises:
            DataError: if a source would never be read, or lacks a field that another source has.
        """
        for number, count in enumerate(self._counts, start=1):
            if not count:
                raise DataError(
                    f"the weight of source {number} is too small: 0 of the {len(self)} samples of a pass",
                    where="mixture",
                    remedy="use a larger weight, or leave the source out",
                )
        fields: list[set[str]] = []
        for source in self.sources:
            first = source.__getitems__([0])
            if isinstance(first, DataError):
                raise first
            fields.append(set(first))
        lacking = set[str]().union(*fields) - fields[0].intersection(*fields)
        if lacking:
            raise DataError(
                f"some sources of the mixture lack the fields {', '.join(sorted(lacking))}",
                where="mixture",
                remedy="prepare all data in the same way, for example all with --use_vsl",
            )

    def find(self, draws: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return, for each draw [draws], the number of its source and the draw within that source."""
        passes, places = np.divmod(draws, len(self))
        turns = self._turns[places]
        numbers = np.searchsorted(self._starts + self._counts, turns, side="right")
        # The count continues from pass to pass, so that even a source with a small weight is read to its end.
        return numbers, passes * self._counts[numbers] + turns - self._starts[numbers]

    @functools.cached_property
    def _turns(self) -> npt.NDArray[np.int64]:
        """Sample numbers in the order of a pass, in which the samples of each source are spread evenly.

        Sample numbers count through the first source, then the second, and so on.
        """
        spread = [(np.arange(count) + 0.5) / count for count in self._counts if count]
        # The sort is stable: sources of equal size have equal keys, and their order must not depend on numpy.
        return np.argsort(np.concatenate(spread), kind="stable")
