"""Scratch memory for large temporaries on the CPU, kept between calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from headwater.core.buffers import large_zeros, pools_keep


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor lies in the memory of the CPU, and is not one that only stands for another."""
    return tensor.device.type == "cpu" and type(tensor) in (Tensor, nn.Parameter)


class WorkspacePool:
    """Lends flat tensors and keeps the largest one of each dtype for the next call.

    On the CPU a large fresh tensor costs a page fault for every 4 KiB touched, which is more than most
    arithmetic on it; CUDA's caching allocator has no such cost, and fake tensors must not outlive their
    mode, so neither is pooled. Where memory is short nothing is kept (`pools_keep`). Threads that borrow at
    the same time get separate memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[torch.dtype, Tensor] = {}

    @contextlib.contextmanager
    def borrow(self, like: Tensor, dtype: torch.dtype, numel: int) -> Iterator[Tensor]:
        """An uninitialised flat tensor of `numel` elements on the device of `like`.

        It must not be used after the context ends.
        """
        pooled = is_plain(like)
        buffer = self._take(dtype, numel) if pooled else None
        if buffer is None:
            buffer = large_zeros((numel,), dtype) if pooled else like.new_empty(numel, dtype=dtype)
        try:
            yield buffer[:numel]
        finally:
            if pooled:
                self._give_back(buffer)

    def clear(self) -> None:
        """Return all idle memory to the system."""
        with self._lock:
            self._idle.clear()

    @property
    def idle_bytes(self) -> int:
        """Bytes held for the next call."""
        with self._lock:
            return sum(buffer.nbytes for buffer in self._idle.values())

    def _take(self, dtype: torch.dtype, numel: int) -> Tensor | None:
        with self._lock:
            buffer = self._idle.pop(dtype, None)
        return buffer if buffer is not None and buffer.numel() >= numel else None

    def _give_back(self, buffer: Tensor) -> None:
        if not pools_keep():
            return
        with self._lock:
            idle = self._idle.get(buffer.dtype)
            if idle is None or idle.numel() < buffer.numel():
                self._idle[buffer.dtype] = buffer
