"""Numbers of the samples of several files that form one data set."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from typing import final


@final
class FileIndex:
    """The samples of several files, numbered file after file.

    Args:
        sizes: number of samples of each file.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._starts = list(itertools.accumulate(sizes, initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def find(self, index: int) -> tuple[int, int]:
        """Return the number of the file that holds a sample, and the sample's number in this file."""
        number = bisect.bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]
