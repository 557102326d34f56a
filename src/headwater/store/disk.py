"""The disk tier: one file per stage, read ahead and written behind in large blocks by worker threads."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import final

import torch

from headwater.core.buffers import PAGE_BYTES, aligned_empty, round_up
from headwater.core.files import disk_errors
from headwater.core.recorder import RECORDER, WAIT
from headwater.core.worker_pools import WorkerPool
from headwater.store.files import open_files
from headwater.store.layout import STAGING_BUFFERS, Group, StageLayout
from headwater.store.tier import WHOLE, Pages, Tier, all_pages, no_pages

_READ_AHEAD = 2
_IO_THREADS = 3
_WIRE_BLOCK_BYTES = 16 << 20


@final
class DiskTier(Tier):
    """The tier on disk. Each stage has one unnamed file: the wire image, then masters and optimizer state.

    The tier takes `staging_bytes` of host memory, which do not grow with the model. A wire image is read
    directly into its slab.

    Attributes:
        origins: the paths at which other ranks of the host open the files.

    Args:
        layouts: one per stage.
        folder: where the files are created; created itself if missing.
        verify: compare what is read with checksums of what was written.
        kept: the groups of each stage that this host keeps, which are contiguous; all groups if not given.
        checksums: memory for the checksums of each file; see `open_files`.
        origins: the paths of the files, if another rank of the host has created them.
        write_behind: true if writes of `groups` may continue after the iteration; false if the iteration ends
            after them.

    Raises:
        DiskFullError: if the files do not fit.
    """

    def __init__(
        self,
        layouts: Sequence[StageLayout],
        folder: Path,
        *,
        verify: bool = False,
        kept: Sequence[Sequence[Group]] | None = None,
        checksums: Sequence[torch.Tensor] | None = None,
        origins: Sequence[Path] | None = None,
        write_behind: bool = True,
    ) -> None:
        super().__init__(layouts)
        self.writes_behind = write_behind
        # A checksum covers a whole block, so only whole blocks are read and written.
        self._wire_unit_bytes = _WIRE_BLOCK_BYTES if verify else PAGE_BYTES
        self.reads_pages = not verify
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        kept = [layout.groups for layout in layouts] if kept is None else kept
        # By stage, the offset in the file that is added to `Group.offset`. The wire image comes first.
        self._rest_at = [
            layout.wire_bytes - (groups[0].offset if groups else 0)
            for layout, groups in zip(layouts, kept, strict=True)
        ]
        self._threads = WorkerPool(_IO_THREADS, "headwater-disk")
        self._staging: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(STAGING_BUFFERS):
            self._staging.put(aligned_empty(largest_group_bytes(layouts)))
        self._writes: list[deque[Future[None]]] = [deque() for _ in layouts]
        # Files are opened last, so that none stays open if memory for the buffers is missing.
        self._files = open_files(
            file_sizes(layouts, folder, kept),
            contents=[f"stage {layout.stage.name!r}" for layout in layouts] if verify else None,
            checksums=checksums,
            origins=origins,
            stages=[layout.stage.name for layout in layouts],
        )
        self.origins = [file.origin for file in self._files]

    def is_here(self, stage: int) -> bool:
        return True

    def resident_wire(self, stage: int) -> None:
        return None

    def on_device(self, stage: int) -> None:
        return None

    def read_wire(self, stage: int, into: torch.Tensor, part: slice = WHOLE) -> None:
        # A read must not overtake a write of the same stage.
        self._settle(stage)
        image = into[: self.layouts[stage].wire_bytes]
        self._all_blocks(self._files[stage].read, image, part)

    def write_wire(self, stage: int, image: torch.Tensor, part: slice = WHOLE) -> None:
        self._all_blocks(self._files[stage].write, image[: self.layouts[stage].wire_bytes], part)

    def _all_blocks(
        self, transfer: Callable[[int, torch.Tensor], None], image: torch.Tensor, part: slice
    ) -> None:
        """Read or write the pages that overlap a part of a wire image; with checksums, the whole blocks."""
        first, stop, _ = part.indices(image.numel())
        if first >= stop:
            return
        unit = self._wire_unit_bytes
        stop = min(round_up(stop, unit), image.numel())
        starts = range(first // unit * unit, stop, _WIRE_BLOCK_BYTES)
        blocks = {start: image[start : min(start + _WIRE_BLOCK_BYTES, stop)] for start in starts}

        # The view is not an argument: a worker thread keeps its last arguments, and with them a slab.
        def one(start: int) -> None:
            transfer(start, blocks.pop(start))

        futures = [self._threads.submit(one, start) for start in starts]
        with RECORDER.span(WAIT):
            for future in futures:
                future.result()

    def groups(
        self, stage: int, groups: Sequence[Group], *, read: Pages = all_pages, write: Pages = no_pages
    ) -> Iterator[tuple[Group, torch.Tensor]]:
        self._settle(stage)
        if not self.reads_pages and write is not all_pages:
            # A checksum covers a whole group, so its other bytes are read too.
            read, write = all_pages, no_pages if write is no_pages else all_pages
        waiting: deque[tuple[Group, torch.Tensor, Future[None] | None]] = deque()
        todo = deque(groups)
        try:
            while todo or waiting:
                while todo and len(waiting) < _READ_AHEAD:
                    with RECORDER.span(WAIT, self.layouts[stage].stage.name):
                        buffer = self._free_buffer(wait=not waiting)
                    if buffer is None:
                        break
                    waiting.append(self._begin(stage, todo.popleft(), buffer, read))
                group, buffer, reading = waiting[0]
                if reading is not None:
                    with RECORDER.span(WAIT, self.layouts[stage].stage.name):
                        reading.result()
                yield group, buffer[: group.num_bytes]
                # The entry is removed after the yield. If the caller fails, `finally` returns this buffer.
                waiting.popleft()
                self._end(stage, group, buffer, write)
            if not self.writes_behind:
                self._settle(stage)
        finally:  # the caller failed or stopped early: the remaining groups are not written
            for _, buffer, reading in waiting:
                if reading is not None:
                    # A worker may still write to the buffer.
                    reading.exception()
                self._staging.put(buffer)

    def _free_buffer(self, *, wait: bool) -> torch.Tensor | None:
        """Return a free staging buffer, or `None` if all are in use and `wait` is false.

        A caller waits only while it holds no buffer. So the callers cannot wait for each other forever.
        """
        try:
            return self._staging.get(block=wait)
        except queue.Empty:
            return None

    def _begin(
        self, stage: int, group: Group, buffer: torch.Tensor, pages: Pages
    ) -> tuple[Group, torch.Tensor, Future[None] | None]:
        if not pages(group):
            return group, buffer, None
        transfer = self._files[stage].read
        return group, buffer, self._threads.submit(self._transfer, transfer, stage, group, buffer, pages)

    def _transfer(
        self,
        transfer: Callable[[int, torch.Tensor], None],
        stage: int,
        group: Group,
        buffer: torch.Tensor,
        pages: Pages,
    ) -> None:
        for part in pages(group):
            transfer(self._rest_at[stage] + group.offset + part.start, buffer[part])

    def _end(self, stage: int, group: Group, buffer: torch.Tensor, pages: Pages) -> None:
        if not pages(group):
            self._staging.put(buffer)
            return
        transfer = self._files[stage].write
        writing = self._threads.submit(self._transfer, transfer, stage, group, buffer, pages)
        # The buffer is free only after the write, which reads it.
        writing.add_done_callback(lambda _: self._staging.put(buffer))
        self._writes[stage].append(writing)

    def _settle(self, stage: int) -> None:
        """Block until all writes to a stage have ended. Raises the error of a write, each time.

        Raises:
            StreamError: in a fork of the process, which lacks the threads that read and write.
        """
        self._threads.check_process()  # a write that began before the fork would never end
        writes = self._writes[stage]
        while writes:
            writing = writes.popleft()
            if not writing.done():
                with RECORDER.span(WAIT, self.layouts[stage].stage.name):
                    wait([writing])
            if writing.exception() is not None:
                writes.appendleft(writing)  # the error stays, because the file stays wrong
            writing.result()

    def settle(self) -> None:
        for stage in range(len(self.layouts)):
            self._settle(stage)

    def close(self) -> None:
        # Workers end before files are closed: one could write to another file with the same descriptor.
        self._threads.shutdown(wait=True, cancel_futures=True)
        for file in self._files:
            file.close()


def file_sizes(
    layouts: Sequence[StageLayout], folder: Path, kept: Sequence[Sequence[Group]]
) -> dict[Path, int]:
    """Return the size in bytes of each stage's file, which holds the wire image and the groups in `kept`.

    Args:
        layouts: one per stage.
        folder: the folder of the files.
        kept: the groups of each stage that are in its file.

    Returns:
        Path of each file -> bytes.
    """
    return {
        folder / f"stage_{index:04d}.bin": layout.wire_bytes + sum(group.num_bytes for group in groups)
        for index, (layout, groups) in enumerate(zip(layouts, kept, strict=True))
    }


def largest_group_bytes(layouts: Sequence[StageLayout]) -> int:
    """Return the size in bytes of the largest group of any stage."""
    return max((group.num_bytes for layout in layouts for group in layout.groups), default=0)


def staging_bytes(layouts: Sequence[StageLayout]) -> int:
    """Return the bytes of host memory that a disk tier takes. They do not grow with the number of stages."""
    return STAGING_BUFFERS * largest_group_bytes(layouts)
