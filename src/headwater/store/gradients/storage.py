"""The storage of gradient sums that the ranks of a host share: in shared memory, or on disk."""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import final

import torch

from headwater.core.buffers import PAGE_BYTES, aligned_empty, round_up
from headwater.core.stage import ParamKey, StageSpec
from headwater.fabric.fabric import Board, Fabric
from headwater.store.files import BlockFile, checksum_bytes, open_files
from headwater.store.gradients.sizes import SumSizes

_BLOCK_BYTES = 4 << 20
_ALIGNMENT_BYTES = 64


PageLock = Callable[[Sequence[torch.Tensor]], Callable[[], None]]
"""Page-locks host memory, and returns a function that unlocks it."""


class GradientStorage(abc.ABC):
    """Storage of gradient sums that ranks share. While a caller uses a sum, no other rank may use that sum.

    Attributes:
        sizes: the sizes of the sums.
        loses_memory: true if the sums of a stage lose their memory when all ranks have used them.
    """

    sizes: SumSizes
    loses_memory = False

    @abc.abstractmethod
    def read(self, key: ParamKey, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return elements `start` to `stop` of a sum: a view of them, or a copy if they are on disk.

        Args:
            key: the parameter.
            start: the first element, in the order of memory.
            stop: one past the last element; the end of the sum if not given.

        Returns:
            The elements, 1-D, in the dtype of the sum.
        """

    @abc.abstractmethod
    def write(self, key: ParamKey, values: torch.Tensor, start: int = 0) -> None:
        """Replace elements of a sum by `values`, from `start` on.

        Args:
            key: the parameter.
            values: the new values, of any shape; converted to the dtype of the sum.
            start: the first element that is replaced.
        """

    @abc.abstractmethod
    def changing(
        self, key: ParamKey, start: int = 0, stop: int | None = None
    ) -> AbstractContextManager[torch.Tensor]:
        """Return elements `start` to `stop` of a sum in a context, inside which they may be changed in place.

        Args:
            key: the parameter.
            start: the first element.
            stop: one past the last element; the end of the sum if not given.
        """

    @abc.abstractmethod
    def add(self, key: ParamKey, gradient: torch.Tensor) -> None:
        """Add a gradient to a whole sum."""

    @abc.abstractmethod
    def open(self, stage: int) -> None:
        """Allocate the sums of a stage, unless they are allocated. New sums have undefined values."""

    @abc.abstractmethod
    def release(self, stage: int) -> None:
        """Record that this rank has used the sums of a stage. Their memory is free when all ranks have."""

    @final
    def clear(self, key: ParamKey) -> None:
        """Set a sum to zero."""
        zero = torch.zeros((), dtype=self.sizes.dtypes[key], device="cpu")
        self.write(key, zero.expand(self.sizes.numel(key)))

    @abc.abstractmethod
    def release_pages(self, stage: int) -> None:
        """Release the page cache of a stage's sums, which will not be used for a while."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release memory or files."""


class SumsInMemory(GradientStorage):
    """Gradient sums in memory that the ranks of a host share."""

    @final
    def write(self, key: ParamKey, values: torch.Tensor, start: int = 0) -> None:
        self.read(key, start, start + values.numel()).copy_(values.reshape(-1))

    @final
    @contextmanager
    def changing(self, key: ParamKey, start: int = 0, stop: int | None = None) -> Iterator[torch.Tensor]:
        yield self.read(key, start, stop)

    @final
    def add(self, key: ParamKey, gradient: torch.Tensor) -> None:
        self.read(key).add_(gradient.reshape(-1))

    @final
    def release_pages(self, stage: int) -> None:
        pass


@final
class MemoryStorage(SumsInMemory):
    """Gradient sums that have memory as long as the store.

    Args:
        sizes: the sizes of the sums.
        fabric: the ranks.
        page_lock: locks the pages of the sums; returns a function that unlocks them.
    """

    def __init__(self, sizes: SumSizes, fabric: Fabric, page_lock: PageLock | None = None) -> None:
        self.sizes = sizes
        places, end = _places(sizes.dtypes, sizes, _ALIGNMENT_BYTES)
        whole = fabric.allocate(end)
        self._unlock = page_lock([whole]) if page_lock is not None else lambda: None
        self._sums = {
            key: whole[offset : offset + sizes.num_bytes(key)].view(sizes.dtypes[key])
            for key, offset in places.items()
        }

    def read(self, key: ParamKey, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self._sums[key][start:stop]

    def open(self, stage: int) -> None:
        pass

    def release(self, stage: int) -> None:
        pass

    def close(self) -> None:
        self._unlock()
        self._sums.clear()


@final
class PooledStorage(SumsInMemory):
    """Gradient sums of stages that are updated during the backward: few of them have memory at a time.

    Stages whose sums have the same size share as many slots of that size. A stage takes the first free slot
    when its first gradient arrives, and gives it back when all ranks have used the sums. The system provides
    a page of memory when it is first written, so slots that are never used take none.

    Args:
        stages: the stages.
        sizes: the sizes of the sums.
        fabric: the ranks.
    """

    loses_memory = True

    def __init__(self, stages: Sequence[StageSpec], sizes: SumSizes, fabric: Fabric) -> None:
        self.sizes = sizes
        self._fabric = fabric
        self._offsets: dict[ParamKey, int] = {}
        self._bytes: list[int] = []  # by stage
        for stage in stages:
            keys = [key for key in sizes.dtypes if key[0] == stage.index]
            places, end = _places(keys, sizes, _ALIGNMENT_BYTES)
            self._offsets.update(places)
            self._bytes.append(round_up(end, PAGE_BYTES))
        slots = sorted(self._bytes)  # the size of each slot
        # size -> its slots
        self._slots = {size: [slot for slot, its in enumerate(slots) if its == size] for size in set(slots)}
        self._starts = [0, *itertools.accumulate(slots)]
        self._memory = fabric.allocate(self._starts[-1])
        self._slot_of = Board(fabric, len(stages))  # by stage, 1 + its slot; 0: none
        self._users = Board(fabric, len(stages))  # by slot, the ranks that have not used its sums

    def read(self, key: ParamKey, start: int = 0, stop: int | None = None) -> torch.Tensor:
        first = self._starts[self._slot_of.read(key[0]) - 1] + self._offsets[key]
        whole = self._memory[first : first + self.sizes.num_bytes(key)].view(self.sizes.dtypes[key])
        return whole[start:stop]

    def open(self, stage: int) -> None:
        if self._slot_of.read(stage):
            return
        with self._fabric.exclusive():
            if not self._slot_of.read(stage):  # otherwise another rank has just opened it
                own = self._slots[self._bytes[stage]]
                slot = next(slot for slot in own if not self._users.read(slot))
                self._users.post(slot, self._fabric.local_size)
                self._slot_of.post(stage, slot + 1)

    def release(self, stage: int) -> None:
        with self._fabric.exclusive():
            slot = self._slot_of.read(stage) - 1
            left = self._users.read(slot) - 1
            if not left:  # before the slot is free, because another stage may take it at once
                self._slot_of.post(stage, 0)
            self._users.post(slot, left)

    def close(self) -> None:
        pass


@final
class DiskStorage(GradientStorage):
    """Gradient sums in files, one file for each stage. The page cache holds a stage's sums while ranks add.

    Args:
        stages: the stages.
        sizes: the sizes of the sums.
        fabric: the ranks; the first one of the host creates the files.
        folder: where the files are created.
        verify: compare all that is read with checksums of what was written.

    Raises:
        DiskFullError: if there is no room.
    """

    def __init__(
        self,
        stages: Sequence[StageSpec],
        sizes: SumSizes,
        fabric: Fabric,
        folder: Path,
        *,
        verify: bool = False,
    ) -> None:
        self.sizes = sizes
        self._offsets: dict[ParamKey, int] = {}
        file_sizes = {}
        for stage in stages:
            keys = [key for key in sizes.dtypes if key[0] == stage.index]
            places, end = _places(keys, sizes, PAGE_BYTES)
            self._offsets.update(places)
            file_sizes[folder / f"gradient_{stage.index:04d}.bin"] = end
        self._files = _shared_files(file_sizes, stages, fabric, verify)

    def read(self, key: ParamKey, start: int = 0, stop: int | None = None) -> torch.Tensor:
        stop = self.sizes.numel(key) if stop is None else stop
        values = torch.empty(stop - start, dtype=self.sizes.dtypes[key], device="cpu")
        for block, inside, part in self._blocks(key, start, stop):
            values[part] = self._load(key, block)[inside]
        return values

    def write(self, key: ParamKey, values: torch.Tensor, start: int = 0) -> None:
        values = values.reshape(-1)
        for block, inside, part in self._blocks(key, start, start + len(values)):
            count = self._span(key, block) // self.sizes.dtypes[key].itemsize
            is_whole = inside.stop - inside.start == count
            # A block that is replaced as a whole need not be read.
            data = self._empty(key, block) if is_whole else self._load(key, block)
            data[inside] = values[part]
            self._save(key, block, data)

    @contextmanager
    def changing(self, key: ParamKey, start: int = 0, stop: int | None = None) -> Iterator[torch.Tensor]:
        values = self.read(key, start, stop)
        yield values
        self.write(key, values, start)

    def add(self, key: ParamKey, gradient: torch.Tensor) -> None:
        gradient = gradient.reshape(-1)
        for block, inside, part in self._blocks(key, 0, len(gradient)):
            data = self._load(key, block)
            data[inside] += gradient[part]
            self._save(key, block, data)

    def release_pages(self, stage: int) -> None:
        self._files[stage].leave_cache()

    def open(self, stage: int) -> None:
        pass

    def release(self, stage: int) -> None:
        pass

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _blocks(self, key: ParamKey, start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield each block with some of the elements `start` to `stop`, and where they are.

        Yields the block's offset in the file, their slice of the block, and their slice of `[start:stop]`.

        Checksums are of whole blocks, so a sum is always read and written in the same blocks.
        """
        size = _BLOCK_BYTES // self.sizes.dtypes[key].itemsize
        for first in range(start - start % size, stop, size):
            begin, end = max(first, start), min(first + size, stop)
            block = self._offsets[key] + first * self.sizes.dtypes[key].itemsize
            yield block, slice(begin - first, end - first), slice(begin - start, end - start)

    def _span(self, key: ParamKey, block: int) -> int:
        """Return how many bytes of a block belong to the sum; the rest of the last page is padding."""
        return min(_BLOCK_BYTES, self._offsets[key] + self.sizes.num_bytes(key) - block)

    def _empty(self, key: ParamKey, block: int) -> torch.Tensor:
        """Allocate memory for a block, in whole pages."""
        return aligned_empty(self._span(key, block)).view(self.sizes.dtypes[key])

    def _load(self, key: ParamKey, block: int) -> torch.Tensor:
        data = self._empty(key, block)
        self._files[key[0]].read(block, data.view(torch.uint8))
        return data

    def _save(self, key: ParamKey, block: int, data: torch.Tensor) -> None:
        self._files[key[0]].write(block, data.view(torch.uint8))


def _places(keys: Iterable[ParamKey], sizes: SumSizes, alignment: int) -> tuple[dict[ParamKey, int], int]:
    """Place the sums one after another. Return the offset of each sum, and the end of the last one."""
    places, end = {}, 0
    for key in keys:
        places[key] = end
        end += round_up(sizes.num_bytes(key), alignment)
    return places, end


def _shared_files(
    sizes: Mapping[Path, int], stages: Sequence[StageSpec], fabric: Fabric, verify: bool
) -> list[BlockFile]:
    """Open the files that the ranks of a host share. The first rank creates them."""
    checksums = [fabric.allocate(checksum_bytes(size)) for size in sizes.values()] if verify else None
    contents = [f"the gradients of stage {stage.name!r}" for stage in stages] if verify else None
    # The files go through the page cache, because the next rank reads what this one has just written.
    make = functools.partial(open_files, sizes, direct=False, contents=contents, checksums=checksums)
    files = make() if fabric.local_rank == 0 else None
    every = fabric.gather_objects([] if files is None else [file.origin for file in files], list[Path])
    return make(origins=every[fabric.rank - fabric.local_rank]) if files is None else files
