"""Pool of scratch memory for large temporary CPU tensors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from headwater.core.buffers import large_empty, pools_keep
from headwater.core.plain import is_plain


class WorkspacePool:
    """A pool of scratch memory: it lends flat tensors, and keeps the largest of each dtype for the next use.

    A large new CPU tensor costs a page fault per 4 KiB, which takes longer than most arithmetic on it. Only
    plain CPU tensors are pooled: CUDA's caching allocator has no such cost, and fake tensors must not outlive
    their mode. If memory is short, the pool keeps nothing (`pools_keep`). Threads that borrow at the same
    time get separate memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[torch.dtype, Tensor] = {}

    @contextlib.contextmanager
    def borrow(self, like: Tensor, dtype: torch.dtype, numel: int) -> Iterator[Tensor]:
        """Lend an uninitialised flat tensor of `numel` elements for the duration of the context.

        Args:
            like: tensor whose device is used.
            dtype: dtype of the tensor.
            numel: number of elements.
        """
        pooled = is_plain(like)
        buffer = self._take(dtype, numel) if pooled else None
        if buffer is None:
            buffer = large_empty((numel,), dtype) if pooled else like.new_empty(numel, dtype=dtype)
        try:
            yield buffer[:numel]
        finally:
            if pooled:
                self._give_back(buffer)

    def clear(self) -> None:
        """Free the tensors that the pool keeps for later use. Borrowed tensors stay."""
        with self._lock:
            self._idle.clear()

    @property
    def idle_bytes(self) -> int:
        """Bytes of memory that no caller borrows at this moment."""
        with self._lock:
            return sum(buffer.nbytes for buffer in self._idle.values())

    def _take(self, dtype: torch.dtype, numel: int) -> Tensor | None:
        with self._lock:
            buffer = self._idle.pop(dtype, None)
        # A buffer that is too small is not put back: it is freed before the larger one is allocated.
        return buffer if buffer is not None and buffer.numel() >= numel else None

    def _give_back(self, buffer: Tensor) -> None:
        if not pools_keep():
            return
        with self._lock:
            idle = self._idle.get(buffer.dtype)
            if idle is None or idle.numel() < buffer.numel():
                self._idle[buffer.dtype] = buffer
