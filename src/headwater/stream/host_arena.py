"""Page-locked host memory for gradients and activations that are copied from or to the device."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import final

import torch

from headwater.core.buffers import PAGE_BYTES, aligned_empty, round_up
from headwater.core.streams import Event


@dataclasses.dataclass(frozen=True, eq=False)
class _Block:
    """Page-locked memory of whole pages, and the function that unlocks it."""

    pages: torch.Tensor
    unlock: Callable[[], None]


@final
class HostArena:
    """Lends page-locked host memory, and lends it again after the borrower has dropped it.

    Locking of pages takes longer than a copy of them, so each step uses the blocks of the step before. The
    pool of page-locked memory of torch rounds sizes up to powers of two and never shrinks. The arena keeps at
    most twice as many bytes as were lent at one time: phases of a step may need blocks of different sizes.

    Args:
        page_lock: locks memory and returns a function that unlocks it; see `Device.page_lock`.
    """

    def __init__(self, page_lock: Callable[[Sequence[torch.Tensor]], Callable[[], None]]) -> None:
        self._page_lock = page_lock
        self._lock = threading.Lock()
        self._idle: dict[int, list[_Block]] = {}  # by size; the size that was used longest ago is first
        # A queue needs no lock: the thread that drops a block may be inside a method that holds the lock.
        self._returned: deque[_Block] = deque()
        self._lent_bytes = self._idle_bytes = self._most_bytes = 0
        self._closed = False

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Return page-locked memory with undefined values.

        The memory returns to the arena when the tensor's last view is freed. No copy may be running then.

        Args:
            num_bytes: size of the memory.

        Returns:
            uint8, of `num_bytes`, page-aligned.

        Raises:
            StreamError: if the system does not lock more memory.
        """
        size = max(round_up(num_bytes), PAGE_BYTES)
        with self._lock:
            self._sort_returned()
            self._most_bytes = max(self._most_bytes, self._lent_bytes + size)
            block = self._take_idle(size) or self._new(size)
            self._lent_bytes += size
        # torch keeps this array while the memory is in use. Python calls `_return` when the array is freed.
        array = block.pages.numpy()[:num_bytes]
        weakref.finalize(array, self._return, block).atexit = False
        return torch.from_numpy(array)

    def _take_idle(self, size: int) -> _Block | None:
        blocks = self._idle.pop(size, [])
        if not blocks:
            return None
        block = blocks.pop()
        if blocks:
            self._idle[size] = blocks
        self._idle_bytes -= size
        return block

    def _new(self, size: int) -> _Block:
        while self._idle and self._lent_bytes + self._idle_bytes + size > 2 * self._most_bytes:
            self._unlock_one(next(iter(self._idle)))
        pages = aligned_empty(size)
        return _Block(pages, self._page_lock([pages]))

    def _unlock_one(self, size: int) -> None:
        block = self._take_idle(size)
        assert block is not None, "each size in the table has a block"
        block.unlock()

    def _return(self, block: _Block) -> None:
        self._returned.append(block)
        if self._closed:
            self._unlock_returned()

    def _sort_returned(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._idle.setdefault(block.pages.nbytes, []).append(block)
            self._lent_bytes -= block.pages.nbytes
            self._idle_bytes += block.pages.nbytes

    def _unlock_returned(self) -> None:
        # Another thread, or a drop inside this one, may take the last block first.
        with contextlib.suppress(IndexError):
            while True:
                self._returned.popleft().unlock()

    def close(self) -> None:
        """Unlock the memory. Memory that is still lent is unlocked when it is freed."""
        with self._lock:
            self._sort_returned()
            # From here on a block that is freed is unlocked by the thread that frees it.
            self._closed = True
            while self._idle:
                self._unlock_one(next(iter(self._idle)))
        self._unlock_returned()


@final
class InFlight:
    """Keeps the memory of copies alive until they are done, and limits its bytes.

    Args:
        limit_bytes: `add` blocks while unfinished copies have more bytes. A single copy may have more.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._copies: deque[tuple[Event, tuple[torch.Tensor, ...], int]] = deque()
        self._bytes = 0

    def add(self, copied: Event, *ends: torch.Tensor) -> None:
        """Keep the tensors `ends` of a copy until its event is reached. Copies are added in their order."""
        self._copies.append((copied, ends, ends[0].nbytes))
        self._bytes += ends[0].nbytes
        while self._copies and (self._copies[0][0].query() or self._is_over()):
            self._finish_first()

    def _is_over(self) -> bool:
        return self._bytes > self._limit_bytes and len(self._copies) > 1

    def _finish_first(self) -> None:
        copied, _, num_bytes = self._copies[0]
        copied.synchronize()
        self._copies.popleft()
        self._bytes -= num_bytes

    def finish(self) -> None:
        """Block until all copies are done."""
        while self._copies:
            self._finish_first()
