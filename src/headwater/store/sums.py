"""Where the sums of gradients lie that the ranks of a host have in common: in shared memory, or on disk."""

from __future__ import annotations

import abc
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from headwater.core.buffers import aligned_empty, round_up
from headwater.core.stage import ParamSpec, StageSpec
from headwater.fabric.fabric import Fabric
from headwater.store.files import BlockFile, open_files, sums_bytes
from headwater.store.gradients import ParamKey

_BLOCK_BYTES = 4 << 20
_ALIGNMENT_BYTES = 64


class Sums(abc.ABC):
    """One sum for each trainable parameter, flat. Whoever calls sees to it that nobody else uses the same.

    Attributes:
        dtypes: of the sums.
        largest_gradient_bytes: of the gradients that a stage gives in one micro-batch.

    Args:
        stages: the stages.
        dtype: of the sums; that of the wire where `None`.
    """

    def __init__(self, stages: Sequence[StageSpec], dtype: torch.dtype | None) -> None:
        self._specs: dict[ParamKey, ParamSpec] = {
            (stage.index, index): param
            for stage in stages
            for index, param in enumerate(stage.params)
            if param.requires_grad
        }
        self.dtypes = {key: dtype or spec.wire_dtype for key, spec in self._specs.items()}
        gradients = Counter[int]()
        for (stage_index, _), spec in self._specs.items():
            gradients[stage_index] += spec.numel * spec.wire_dtype.itemsize
        self.largest_gradient_bytes = max(gradients.values(), default=0)

    def numel(self, key: ParamKey) -> int:
        """Elements of a sum."""
        return self._specs[key].numel

    @abc.abstractmethod
    def read(self, key: ParamKey, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """These elements: where they lie, or a copy."""

    @abc.abstractmethod
    def write(self, key: ParamKey, values: torch.Tensor, start: int = 0) -> None:
        """Replace as many elements as there are values, from `start` on."""

    @contextmanager
    def changing(self, key: ParamKey, start: int = 0, stop: int | None = None) -> Iterator[torch.Tensor]:
        """These elements, to be changed in place while the context is open."""
        values = self.read(key, start, stop)
        yield values
        self.write(key, values, start)

    @abc.abstractmethod
    def add(self, key: ParamKey, gradient: torch.Tensor) -> None:
        """Add a gradient to a whole sum."""

    def clear(self, key: ParamKey) -> None:
        """Let a sum be zero."""
        self.write(key, torch.zeros((), dtype=self.dtypes[key]).expand(self.numel(key)))

    @abc.abstractmethod
    def rest(self, stage: int) -> None:
        """Say that the sums of a stage will not be used for a while."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back memory or files."""

    def _bytes(self, key: ParamKey) -> int:
        return self.numel(key) * self.dtypes[key].itemsize


class MemorySums(Sums):
    """Sums in memory that the ranks of a host share.

    Args:
        stages: the stages.
        dtype: of the sums; that of the wire where `None`.
        fabric: the ranks.
    """

    def __init__(self, stages: Sequence[StageSpec], dtype: torch.dtype | None, fabric: Fabric) -> None:
        super().__init__(stages, dtype)
        sizes = {key: self._bytes(key) for key in self._specs}
        whole = fabric.allocate(sum(round_up(size, _ALIGNMENT_BYTES) for size in sizes.values()))
        self._totals: dict[ParamKey, torch.Tensor] = {}
        offset = 0
        for key, size in sizes.items():
            part = whole[offset : offset + size]
            self._totals[key] = part.view(self.dtypes[key])
            offset += round_up(size, _ALIGNMENT_BYTES)

    def read(self, key: ParamKey, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self._totals[key][start:stop]

    def write(self, key: ParamKey, values: torch.Tensor, start: int = 0) -> None:
        self.read(key, start, start + values.numel()).copy_(values.reshape(-1))

    @contextmanager
    def changing(self, key: ParamKey, start: int = 0, stop: int | None = None) -> Iterator[torch.Tensor]:
        yield self.read(key, start, stop)

    def add(self, key: ParamKey, gradient: torch.Tensor) -> None:
        self._totals[key].add_(gradient.reshape(-1))

    def rest(self, stage: int) -> None:
        pass

    def close(self) -> None:
        self._totals.clear()


class DiskSums(Sums):
    """Sums in files, one for each stage; while a stage is added to the system keeps them in memory.

    Args:
        stages: the stages.
        dtype: of the sums; that of the wire where `None`.
        fabric: the ranks, of which the first of the host makes the files.
        folder: where the files go.
        verify: compare what is read with checksums of what was written.

    Raises:
        DiskFullError: if there is no room.
    """

    def __init__(
        self,
        stages: Sequence[StageSpec],
        dtype: torch.dtype | None,
        fabric: Fabric,
        folder: Path,
        *,
        verify: bool = False,
    ) -> None:
        super().__init__(stages, dtype)
        self._offsets: dict[ParamKey, int] = {}
        sizes = {folder / f"gradient_{stage.index:04d}.bin": self._lay_out(stage) for stage in stages}
        self._files = _shared_files(sizes, stages, fabric, verify)

    def _lay_out(self, stage: StageSpec) -> int:
        """Give the sums of a stage their places; returns the bytes of its file."""
        end = 0
        for param in range(len(stage.params)):
            if (stage.index, param) in self._specs:
                self._offsets[stage.index, param] = end
                end += round_up(self._bytes((stage.index, param)))
        return end

    def read(self, key: ParamKey, start: int = 0, stop: int | None = None) -> torch.Tensor:
        stop = self.numel(key) if stop is None else stop
        values = torch.empty(stop - start, dtype=self.dtypes[key])
        for block, inside, part in self._blocks(key, start, stop):
            values[part] = self._load(key, block)[inside]
        return values

    def write(self, key: ParamKey, values: torch.Tensor, start: int = 0) -> None:
        values = values.reshape(-1)
        for block, inside, part in self._blocks(key, start, start + len(values)):
            is_whole = inside.stop - inside.start == self._span(key, block) // self.dtypes[key].itemsize
            data = self._empty(key, block) if is_whole else self._load(key, block)
            data[inside] = values[part]
            self._save(key, block, data)

    def add(self, key: ParamKey, gradient: torch.Tensor) -> None:
        gradient = gradient.reshape(-1)
        for block, inside, part in self._blocks(key, 0, len(gradient)):
            data = self._load(key, block)
            data[inside] += gradient[part]
            self._save(key, block, data)

    def rest(self, stage: int) -> None:
        self._files[stage].leave_cache()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _blocks(self, key: ParamKey, start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
        """Where elements from `start` to `stop` are: a block, which elements of it, and which of these."""
        size = _BLOCK_BYTES // self.dtypes[key].itemsize
        for first in range(start - start % size, stop, size):
            begin, end = max(first, start), min(first + size, stop)
            block = self._offsets[key] + first * self.dtypes[key].itemsize
            yield block, slice(begin - first, end - first), slice(begin - start, end - start)

    def _span(self, key: ParamKey, block: int) -> int:
        """Bytes of a block that are the sum's."""
        return min(_BLOCK_BYTES, self._offsets[key] + self._bytes(key) - block)

    def _empty(self, key: ParamKey, block: int) -> torch.Tensor:
        """Memory for a block, in whole pages."""
        return aligned_empty(self._span(key, block)).view(self.dtypes[key])

    def _load(self, key: ParamKey, block: int) -> torch.Tensor:
        data = self._empty(key, block)
        self._files[key[0]].read(block, data.view(torch.uint8))
        return data

    def _save(self, key: ParamKey, block: int, data: torch.Tensor) -> None:
        self._files[key[0]].write(block, data.view(torch.uint8))


def _shared_files(
    sizes: dict[Path, int], stages: Sequence[StageSpec], fabric: Fabric, verify: bool
) -> list[BlockFile]:
    """Files that the ranks of a host share; the first of them makes them."""
    sums = [fabric.allocate(sums_bytes(size)) for size in sizes.values()] if verify else None
    contents = [f"the gradients of stage {stage.name!r}" for stage in stages] if verify else None
    # Through the page cache: what a rank has just written the next one reads.
    make = functools.partial(open_files, sizes, direct=False, contents=contents, sums=sums)
    files = make() if fabric.local_rank == 0 else None
    every = fabric.gather_objects([] if files is None else [file.origin for file in files], list[Path])
    return make(origins=every[fabric.rank - fabric.local_rank]) if files is None else files
