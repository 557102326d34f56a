"""Files of the samples of each split; files that a killed preparation completed are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.progress import Progress

from headwater.data.order import Indices
from headwater.data.workers import ordered_map


@dataclasses.dataclass(frozen=True)
class SplitFiles:
    """Writer of the files `SPLIT/data-NNNNN.SUFFIX` in a folder.

    Attributes:
        folder: folder of the prepared data.
        samples_per_file: samples in each file except the last of a split.
        num_workers: worker processes; 1 or less: work in this process.
        bar: progress bar.
    """

    folder: Path
    samples_per_file: int
    num_workers: int
    bar: Progress

    def write(
        self,
        splits: Mapping[str, Indices],
        task_of: Callable[[Indices], Any],
        write: Callable[[tuple[Path, Any]], int],
        suffix: str,
    ) -> dict[str, int]:
        """Write the samples of each split to files; return the number of samples by split.

        Args:
            splits: numbers of the samples of each split, in order.
            task_of: returns what `write` needs to know about some samples.
            write: writes a file and returns its number of samples; runs in worker processes. Files that exist
                are skipped, so it must rename a file to its name only when it is complete.
            suffix: suffix of the files.
        """
        shown = self.bar.add_task("writing samples", total=sum(map(len, splits.values())))

        def tasks() -> Iterator[tuple[Path, Any]]:
            for path, samples in self._files(splits, suffix):
                if path.exists():
                    self.bar.advance(shown, len(samples))
                else:
                    yield path, task_of(samples)

        for count in ordered_map(write, tasks(), self.num_workers):
            self.bar.advance(shown, count)
        return {name: len(samples) for name, samples in splits.items()}

    def _files(self, splits: Mapping[str, Indices], suffix: str) -> Iterator[tuple[Path, Indices]]:
        for name, samples in splits.items():
            (self.folder / name).mkdir(exist_ok=True)
            for number, start in enumerate(range(0, len(samples), self.samples_per_file)):
                path = self.folder / name / f"data-{number:05d}{suffix}"
                yield path, samples[start : start + self.samples_per_file]
