"""The disk tier: one file per stage, read ahead and written behind in large blocks by worker threads."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from headwater.core.buffers import aligned_empty
from headwater.core.files import disk_errors
from headwater.store.files import open_files
from headwater.store.layout import Group, StageLayout
from headwater.store.tier import Tier

_READ_AHEAD = 2
_STAGING_BUFFERS = 4  # two readers of _READ_AHEAD buffers each cannot wait for one another
_IO_THREADS = 3
_WIRE_BLOCK_BYTES = 16 << 20


class DiskTier(Tier):
    """A file without a name for each stage: the wire image, then the rest.

    Host memory: `staging_bytes`, whatever the size of the model; a wire image is read into its slab.

    Args:
        layouts: one per stage.
        folder: where the files go; created if missing.
        direct: bypass the page cache.
        verify: compare what is read with checksums of what was written.

    Raises:
        DiskFullError: if the files do not fit.
    """

    def __init__(
        self, layouts: list[StageLayout], folder: Path, *, direct: bool = True, verify: bool = False
    ) -> None:
        super().__init__(layouts)
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        sizes = {folder / f"stage_{i:04d}.bin": lay.file_bytes for i, lay in enumerate(layouts)}
        contents = [f"stage {layout.stage.name!r}" for layout in layouts] if verify else None
        self._files = open_files(sizes, direct=direct, contents=contents)
        self._threads = ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="headwater-disk")
        self._staging: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(_STAGING_BUFFERS):
            self._staging.put(aligned_empty(largest_group_bytes(layouts)))
        self._writes: list[deque[Future[None]]] = [deque() for _ in layouts]

    def resident_wire(self, stage: int) -> None:
        return None

    def read_wire(self, stage: int, into: torch.Tensor) -> None:
        self._settle(stage)
        image = into[: self.layouts[stage].wire_bytes]
        self._all_blocks(self._files[stage].read, image)

    def write_wire(self, stage: int, image: torch.Tensor) -> None:
        self._all_blocks(self._files[stage].write, image[: self.layouts[stage].wire_bytes])

    def _all_blocks(self, transfer: Callable[[int, torch.Tensor], None], image: torch.Tensor) -> None:
        starts = range(0, image.numel(), _WIRE_BLOCK_BYTES)
        blocks = {start: image[start : start + _WIRE_BLOCK_BYTES] for start in starts}

        def one(start: int) -> None:  # a worker keeps its last arguments a while: no view among them
            transfer(start, blocks.pop(start))

        futures = [self._threads.submit(one, start) for start in starts]
        for future in futures:
            future.result()

    def groups(
        self, stage: int, *, read: bool = True, write: bool, params: Collection[int] | None = None
    ) -> Iterator[tuple[Group, torch.Tensor]]:
        self._settle(stage)
        waiting: deque[tuple[Group, torch.Tensor, Future[None] | None]] = deque()
        todo = deque(self.layouts[stage].groups_of(params))
        try:
            while todo or waiting:
                while todo and len(waiting) < _READ_AHEAD:
                    waiting.append(self._begin(stage, todo.popleft(), read))
                group, buffer, reading = waiting[0]
                if reading is not None:
                    reading.result()
                yield group, buffer[: group.num_bytes]
                waiting.popleft()
                self._end(stage, group, buffer, write)
        finally:  # the caller failed or stopped early: nothing of what is left is written
            for _, buffer, reading in waiting:
                if reading is not None:
                    reading.exception()
                self._staging.put(buffer)

    def _begin(self, stage: int, group: Group, read: bool) -> tuple[Group, torch.Tensor, Future[None] | None]:
        buffer = self._staging.get()
        if not read:
            return group, buffer, None
        offset = self.layouts[stage].wire_bytes + group.offset
        reading = self._threads.submit(self._files[stage].read, offset, buffer[: group.num_bytes])
        return group, buffer, reading

    def _end(self, stage: int, group: Group, buffer: torch.Tensor, write: bool) -> None:
        if not write:
            self._staging.put(buffer)
            return
        offset = self.layouts[stage].wire_bytes + group.offset
        writing = self._threads.submit(self._files[stage].write, offset, buffer[: group.num_bytes])
        writing.add_done_callback(lambda _: self._staging.put(buffer))
        self._writes[stage].append(writing)

    def _settle(self, stage: int) -> None:
        writes = self._writes[stage]
        while writes:
            writing = writes.popleft()
            if writing.exception() is not None:
                writes.appendleft(writing)  # it stays: the file is not what it should be
            writing.result()

    def settle(self) -> None:
        for stage in range(len(self.layouts)):
            self._settle(stage)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for file in self._files:
            file.close()


def largest_group_bytes(layouts: list[StageLayout]) -> int:
    """Bytes of the largest group of any stage."""
    return max((group.num_bytes for layout in layouts for group in layout.groups), default=0)


def staging_bytes(layouts: list[StageLayout]) -> int:
    """Host memory that a disk tier of these layouts takes, whatever the size of the model."""
    return _STAGING_BUFFERS * largest_group_bytes(layouts)
