"""Search in an index of passages."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from headwater.core.errors import DataError
from headwater.data.passages import Passage
from headwater.retrieval.files import MANIFEST_FILE, PassageFile, read_manifest


@dataclasses.dataclass(frozen=True)
class Hit:
    """A passage that a search has found.

    Attributes:
        score: inner product of the vectors of the question and of the passage.
        number: number of the passage in the index.
        passage: the passage.
    """

    score: float
    number: int
    passage: Passage


@final
class PassageIndex:
    """An index that `headwater index` has written. It may be larger than memory.

    Args:
        folder: the folder of the index.

    Attributes:
        folder: see above.
        manifest: the content of its manifest.

    Raises:
        DataError: if the folder is not an index.
        CorruptError: if the manifest is damaged, or a file is missing or truncated.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        entries, dimension = self.manifest.files, self.manifest.dimension
        self._files = [PassageFile(folder / entry.name, entry, dimension) for entry in entries]
        # The number of the first passage of each file, and the number of all passages.
        self._starts = list(itertools.accumulate((file.num_passages for file in self._files), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def passage(self, number: int) -> Passage:
        """Return a passage by its number.

        Raises:
            CorruptError: if its file is damaged.
        """
        place = bisect.bisect_right(self._starts, number) - 1
        return self._files[place].passage(number - self._starts[place])

    def check_count(self, k: int) -> None:
        """Check that a search for `k` passages is possible.

        Raises:
            DataError: if the index has fewer, or `k` is not positive.
        """
        if not 1 <= k <= len(self):
            raise DataError(
                f"expected from 1 to {len(self)} passages, the number in the index; got {k}",
                where=str(self.folder),
                remedy=f"ask for at most {len(self)} passages",
            )

    def search(self, vectors: Tensor, k: int) -> list[list[Hit]]:
        """Return the `k` passages with the largest inner products for each vector, the best one first.

        The search is exact: it compares all passages, file by file.

        Args:
            vectors: vectors of questions, [questions, dimension].
            k: number of passages.

        Raises:
            DataError: if the vectors have another dimension, or the index has fewer than `k` passages.
            CorruptError: if a file is damaged.
        """
        if vectors.dim() != 2 or vectors.shape[1] != self.manifest.dimension:
            raise DataError(
                f"expected vectors of shape [questions, {self.manifest.dimension}], got {[*vectors.shape]}",
                where=str(self.folder / MANIFEST_FILE),
                remedy="encode the questions with the model that made the index",
            )
        self.check_count(k)
        scores, numbers = self._best(vectors.float().cpu(), k)
        return [
            [Hit(score, number, self.passage(number)) for score, number in zip(*row, strict=True)]
            for row in zip(scores.tolist(), numbers.tolist(), strict=True)
        ]

    def _best(self, vectors: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the largest products in falling order, and the passages' numbers, each [questions, k]."""
        scores = torch.empty(len(vectors), 0)
        numbers = torch.empty(len(vectors), 0, dtype=torch.int64)
        for start, file in zip(self._starts, self._files, strict=False):
            found = (vectors @ file.vectors.mT).topk(min(k, file.num_passages))
            scores = torch.cat([scores, found.values], 1)
            numbers = torch.cat([numbers, found.indices + start], 1)
            scores, order = scores.topk(min(k, scores.shape[1]))
            numbers = numbers.gather(1, order)
        return scores, numbers
