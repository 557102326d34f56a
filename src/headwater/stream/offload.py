"""Activations that leave the device until backward wants them: to disk, or to page-locked host memory."""

from __future__ import annotations

import abc
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from headwater.core.buffers import aligned_empty, round_up
from headwater.core.files import disk_errors
from headwater.store.files import BlockFile

_SMALLEST_BYTES = 64 << 10
"""What is smaller stays: moving it costs more than it frees."""

_WRITERS = 2


class Offload(abc.ABC):
    """Moves activations out."""

    def __call__(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Begin to move a tensor out.

        Returns:
            What brings it back when called; `None` if it is too small to be worth it.
        """
        return self.move(tensor) if tensor.numel() * tensor.element_size() >= _SMALLEST_BYTES else None

    @abc.abstractmethod
    def move(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to move a tensor out, and return what brings it back."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back threads."""


class HostOffload(Offload):
    """To page-locked host memory, in the order of the compute stream: right without further waiting."""

    def move(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        device = tensor.device
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor.detach(), non_blocking=True)
        return lambda: host.to(device, non_blocking=True)

    def close(self) -> None:
        pass


class DiskOffload(Offload):
    """To files; for a device that has no other memory than the host's.

    Args:
        folder: where the files go.
    """

    def __init__(self, folder: Path) -> None:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._names = itertools.count()
        self._threads = ThreadPoolExecutor(_WRITERS, thread_name_prefix="headwater-offload")
        self._slots = threading.BoundedSemaphore(2 * _WRITERS)  # else a slow disk would leave all in memory

    def move(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        self._slots.acquire()
        path = self._folder / f"activation_{next(self._names)}.bin"
        moved = _Offloaded(path, tensor, self._threads)
        moved.written.add_done_callback(lambda _: self._slots.release())
        return moved

    def close(self) -> None:
        self._threads.shutdown(wait=True)


class _Offloaded:
    """One tensor in a file; calling it gives the tensor back."""

    def __init__(self, path: Path, tensor: torch.Tensor, threads: ThreadPoolExecutor) -> None:
        self._path = path
        self._dtype, self._shape = tensor.dtype, tensor.shape
        self._num_bytes = tensor.numel() * tensor.element_size()
        self.written: Future[BlockFile] = threads.submit(self._write, tensor)

    def _write(self, tensor: torch.Tensor) -> BlockFile:
        file = BlockFile(self._path, round_up(self._num_bytes))
        buffer = aligned_empty(self._num_bytes)
        self._view(buffer).copy_(tensor.detach())
        file.write(0, buffer)
        return file

    def _view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[: self._num_bytes].view(self._dtype).view(self._shape)

    def __call__(self) -> torch.Tensor:
        buffer = aligned_empty(self._num_bytes)
        self.written.result().read(0, buffer)
        return self._view(buffer)

    def __del__(self) -> None:
        if not self.written.cancel() and self.written.exception() is None:
            self.written.result().close()
