"""Several data sets as one, each with a share of the samples."""

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
    """Samples of several sources, evenly mixed. Which one a draw gives depends on its number alone.

    A pass has as many samples as all sources together. A source whose share asks for more than it has begins
    anew within the pass; one that has more goes on with the rest in the next pass.

    Args:
        sources: data sets with samples of one length.
        weights: of each; their sum need not be 1.

    Raises:
        DataError: if the samples differ in length.
    """

    def __init__(self, sources: Sequence[Samples], weights: Sequence[float]) -> None:
        self.sources = list(sources)
        lengths = [source.sequence_length for source in sources]
        if len(set(lengths)) != 1:
            raise DataError(
                f"the sources of a mixture have samples of {', '.join(map(str, lengths))} tokens",
                where="mixture",
                remedy="prepare all data with one sequence_length",
            )
        total = sum(map(len, sources))
        ends = np.rint(np.cumsum(weights) / sum(weights) * total).astype(np.int64)
        self._counts = np.diff(ends, prepend=0)
        self._starts = ends - self._counts

    @property
    def sequence_length(self) -> int | None:
        """Tokens of a sample."""
        return self.sources[0].sequence_length

    def __len__(self) -> int:
        return int(self._counts.sum())

    def __getitems__(self, draws: Sequence[int]) -> Batch | DataError:
        """The batch of these samples; see `headwater.data.source.Samples`."""
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
        """See that all sources are read, and that their samples have the same fields.

        Raises:
            DataError: if not: what one lacks would be missing in silence.
        """
        for number, count in enumerate(self._counts, start=1):
            if not count:
                raise DataError(
                    f"source {number} of the mixture would have none of the {len(self)} samples of a pass",
                    where="mixture",
                    remedy="give it a larger weight, or leave it out",
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
                f"a source of the mixture has no {', '.join(sorted(lacking))}, others have",
                where="mixture",
                remedy="prepare all data in the same way (--use_vsl)",
            )

    def find(self, draws: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Number of the source of each draw, and the draw there."""
        passes, places = np.divmod(draws, len(self))
        turns = self._turns[places]
        numbers = np.searchsorted(self._starts + self._counts, turns, side="right")
        return numbers, passes * self._counts[numbers] + turns - self._starts[numbers]

    @functools.cached_property
    def _turns(self) -> npt.NDArray[np.int64]:
        """Samples of a pass in their order, each source's spread evenly; numbered source after source."""
        spread = [(np.arange(count) + 0.5) / count for count in self._counts if count]
        return np.argsort(np.concatenate(spread), kind="stable")
