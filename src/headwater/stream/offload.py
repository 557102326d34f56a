"""Offloading: activations are moved to disk or to page-locked host memory until backward needs them.

A whole storage is moved, and only once, even if autograd saves several views of it: any view would keep the
whole storage in memory. A view is restored as the same view of the restored storage.
"""

from __future__ import annotations

import abc
import itertools
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path

import torch

from headwater.core.buffers import aligned_empty, round_up
from headwater.core.cleanup import on_failure
from headwater.core.files import disk_errors
from headwater.core.streams import Event
from headwater.core.worker_pools import WorkerPool, single_core_pool
from headwater.plan.memory.activations import OFFLOAD_BLOCK_BYTES, OFFLOAD_WINDOW_BYTES, OFFLOAD_WRITERS
from headwater.plan.types import Plan
from headwater.plan.writes import changed_in_place
from headwater.store.files import BlockFile
from headwater.stream.device import Device
from headwater.stream.host_arena import HostArena, InFlight

_SMALLEST_BYTES = 64 << 10
"""Smaller storages are not offloaded: moving them costs more than it saves."""


class Moved(abc.ABC):
    """The storage of an activation whose bytes are offloaded, and how to read them again."""

    def __init__(self) -> None:
        self._returned: weakref.ref[torch.UntypedStorage] | None = None

    def bring_back(self) -> torch.Tensor:
        """Return the bytes on the device, in memory that later calls share while it is referenced."""
        storage = None if self._returned is None else self._returned()
        if storage is not None:
            return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        flat = self._fetch()
        # A weak reference, because backward alone decides how long the bytes stay.
        self._returned = weakref.ref(flat.untyped_storage())
        return flat

    @abc.abstractmethod
    def _fetch(self) -> torch.Tensor:
        """Read the bytes into new memory on the device."""


class SavedView:
    """An object that autograd saves instead of an offloaded tensor; calling it returns the tensor."""

    def __init__(self, moved: Moved, tensor: torch.Tensor) -> None:
        self._moved = moved
        self._dtype = tensor.dtype
        self._layout = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())

    def __call__(self) -> torch.Tensor:
        flat = self._moved.bring_back()
        whole = flat[: flat.numel() // self._dtype.itemsize * self._dtype.itemsize].view(self._dtype)
        return whole.as_strided(*self._layout)


class Offload(abc.ABC):
    """Offloads activations: call it with a tensor that autograd saves."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[int, weakref.ref[Moved]]] = (
            weakref.WeakKeyDictionary()
        )

    def __call__(self, tensor: torch.Tensor) -> SavedView | None:
        """Start to offload the storage of a tensor, unless that was done and it has not changed since.

        Returns:
            A function that returns the tensor again; `None` if the tensor stays, because it is too small or
            not plain memory.
        """
        if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < _SMALLEST_BYTES:
            return None
        version, reference = self._known.get(storage, (-1, None))
        moved = None if reference is None else reference()
        if moved is None or version != tensor._version:
            moved = self.move(tensor.detach())
            self._known[storage] = tensor._version, weakref.ref(moved)
        return SavedView(moved, tensor)

    @abc.abstractmethod
    def move(self, tensor: torch.Tensor) -> Moved:
        """Start to offload the storage of a tensor."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop the threads."""


class HostOffload(Offload):
    """Offloads to page-locked host memory, for a device with separate memory.

    Storages are copied back ahead in the reverse of the order in which they left, because backward needs them
    in that order. Copies in both directions overlap with the computation.

    Args:
        device: the device that computes.
        arena: the host memory.
        window_bytes: maximum bytes that are on their way to the host at a time, and maximum bytes that are
            copied back ahead. A single storage may be larger.
    """

    def __init__(self, device: Device, arena: HostArena, window_bytes: int = OFFLOAD_WINDOW_BYTES) -> None:
        super().__init__()
        self._device = device
        self._arena = arena
        self._window_bytes = window_bytes
        self._out, self._back = device.new_stream(), device.new_stream()
        self._leaving = InFlight(window_bytes)
        self._returning = InFlight(window_bytes)
        self._stack: list[weakref.ref[_OnHost]] = []
        self._ahead: weakref.WeakSet[_OnHost] = weakref.WeakSet()  # copied back, and not used yet

    def move(self, tensor: torch.Tensor) -> Moved:
        flat = _bytes_of(tensor)
        host = self._arena.lend(flat.nbytes)
        # Work that was queued before computes the values, and may still read former contents of `host`.
        self._out.wait(self._device.compute.record())
        self._out.copy(host, flat)
        copied = self._out.record()
        self._leaving.add(copied, flat, host)
        moved = _OnHost(self, host, copied)
        while self._stack and self._stack[-1]() is None:  # storages freed without a backward
            self._stack.pop()
        self._stack.append(weakref.ref(moved))
        return moved

    def bring_back(self, moved: _OnHost) -> torch.Tensor:
        """Return the bytes of `moved` on the device, and start to copy the following storages back."""
        flat, returned = moved.take_back() or self._copy_back(moved)
        self._ahead.discard(moved)
        while self._stack:
            following = self._stack[-1]()
            if following is not None and not following.was_used:
                waiting = sum(other.num_bytes for other in self._ahead)
                if waiting and waiting + following.num_bytes > self._window_bytes:
                    break
                following.back = self._copy_back(following)
                self._ahead.add(following)
            self._stack.pop()
        # This is last: copies ahead wait for work queued on `compute`, and must not wait for this event.
        self._device.compute.wait(returned)
        return flat

    def _copy_back(self, moved: _OnHost) -> tuple[torch.Tensor, Event]:
        """Queue the copy of a storage to new memory on the device. Return the memory and the event."""
        flat = torch.empty(moved.num_bytes, dtype=torch.uint8, device=self._device.torch_device)
        # Work that was queued before may still use the former contents of this memory.
        self._back.wait(self._device.compute.record())
        self._back.wait(moved.copied)
        self._back.copy(flat, moved.host)
        returned = self._back.record()
        self._returning.add(returned, moved.host)
        return flat, returned

    def close(self) -> None:
        self._leaving.finish()
        self._returning.finish()


class _OnHost(Moved):
    """The storage of an activation in page-locked host memory, or on its way there.

    Attributes:
        host: its bytes.
        copied: the event of the copy to `host`.
        num_bytes: its size.
        back: memory on the device to which it is copied ahead of its use, and the event of that copy.
        was_used: true after backward has used it.
    """

    def __init__(self, owner: HostOffload, host: torch.Tensor, copied: Event) -> None:
        super().__init__()
        self._owner = owner
        self.host = host
        self.copied = copied
        self.num_bytes = host.nbytes
        self.back: tuple[torch.Tensor, Event] | None = None
        self.was_used = False

    def take_back(self) -> tuple[torch.Tensor, Event] | None:
        """Return `back`, and set it to `None`, because backward uses the storage now."""
        self.was_used = True
        back, self.back = self.back, None
        return back

    def _fetch(self) -> torch.Tensor:
        return self._owner.bring_back(self)

    def __del__(self) -> None:
        # If the graph is freed before backward uses the copy, nothing else waits for the end of the copy.
        if self.back is not None:
            self.back[1].synchronize()


class DiskOffload(Offload):
    """Offloads to files, for a device whose memory is host memory.

    Storages are read ahead in the reverse of the order in which they were written, because backward needs
    them in that order.

    Args:
        folder: folder of the files.
        window_bytes: maximum bytes that are being written at a time, and maximum bytes that have been read
            and are in memory. A single storage may be larger.
    """

    def __init__(self, folder: Path, window_bytes: int = OFFLOAD_WINDOW_BYTES) -> None:
        super().__init__()
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._numbers = itertools.count()
        self._window_bytes = window_bytes
        self._leaving = _Window(window_bytes)
        self._writers = single_core_pool(OFFLOAD_WRITERS, "headwater-offload-write")
        self._reader = single_core_pool(1, "headwater-offload-read")
        self._stack: list[weakref.ref[_OnDisk]] = []
        self._back: weakref.WeakSet[_OnDisk] = weakref.WeakSet()

    def move(self, tensor: torch.Tensor) -> Moved:
        self._writers.check_process()  # before the bytes are counted: they would never leave the window
        num_bytes = tensor.untyped_storage().nbytes()
        # This blocks before the write is queued: an unlimited queue would keep all activations in memory.
        self._leaving.enter(num_bytes)
        path = self._folder / f"activation_{next(self._numbers)}.bin"
        moved = _OnDisk(self, tensor, path, self._writers)
        moved.written.add_done_callback(lambda _: self._leaving.leave(num_bytes))
        while self._stack and self._stack[-1]() is None:  # storages freed without a backward
            self._stack.pop()
        self._stack.append(weakref.ref(moved))
        return moved

    def bring_back(self, moved: _OnDisk) -> torch.Tensor:
        """Return the bytes of `moved`, for which backward waits, and start to read the following storages."""
        self._has_room(moved)
        back = self._read(moved)
        while self._stack:
            following = self._stack[-1]()
            if following is not None and following.back is None:
                if not self._has_room(following):
                    break
                self._read(following)
            self._stack.pop()
        # The flag is set only now: `_has_room` above drops used storages, and this one must stay.
        moved.was_used = True
        return back.result()

    def _read(self, moved: _OnDisk) -> Future[torch.Tensor]:
        if moved.back is None:
            moved.back = self._reader.submit(moved.read)
            self._back.add(moved)
        return moved.back

    def _has_room(self, moved: _OnDisk) -> bool:
        """True if the window has room to read one more storage. May drop used storages to make room."""
        if not self._fits(moved):
            for other in [other for other in self._back if other.was_used]:
                other.back = None
                self._back.discard(other)
        return self._fits(moved)

    def _fits(self, moved: _OnDisk) -> bool:
        used = sum(other.num_bytes for other in self._back if other is not moved)
        return used == 0 or used + moved.num_bytes <= self._window_bytes

    def close(self) -> None:
        # The reader first: it waits for writes.
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._writers.shutdown(wait=True)


class _OnDisk(Moved):
    """The storage of an activation that is in a file, or that is being written or read.

    Attributes:
        num_bytes: size of the storage.
        written: done when the storage is in its file.
        back: the bytes, after a read was started; `None` before, and after they were dropped to make room.
        was_used: true after backward has used the bytes.
    """

    def __init__(self, owner: DiskOffload, tensor: torch.Tensor, path: Path, writers: WorkerPool) -> None:
        super().__init__()
        self._owner = owner
        self._path = path
        self._tensor: torch.Tensor | None = tensor
        self._version = tensor._version
        self.num_bytes = tensor.untyped_storage().nbytes()
        self.back: Future[torch.Tensor] | None = None
        self.was_used = False
        self.written: Future[BlockFile] = writers.submit(self._write)

    def _write(self) -> BlockFile:
        source = self._source()
        file = BlockFile(self._path, round_up(self.num_bytes))
        with on_failure(file.close):
            buffer = aligned_empty(min(self.num_bytes, OFFLOAD_BLOCK_BYTES))
            for start in range(0, self.num_bytes, OFFLOAD_BLOCK_BYTES):
                block = source[start : start + OFFLOAD_BLOCK_BYTES]
                buffer[: block.numel()].copy_(block)
                file.write(start, buffer[: round_up(block.numel())])
            self._source()  # check that it did not change during the write
        # The tensor is dropped only now, because the check above needs it.
        self._tensor = None
        return file

    def _source(self) -> torch.Tensor:
        tensor = self._tensor
        assert tensor is not None, "bytes that are not written yet are in memory"
        if tensor._version != self._version:
            raise changed_in_place(tensor.shape)
        return _bytes_of(tensor)

    def read(self) -> torch.Tensor:
        """Return the bytes: from memory if their write has not begun, otherwise from the file.

        Runs on the thread that reads.
        """
        if self.written.cancel():
            return self._source()
        buffer = aligned_empty(self.num_bytes)
        self.written.result().read(0, buffer)
        return buffer[: self.num_bytes]

    def _fetch(self) -> torch.Tensor:
        return self._owner.bring_back(self)

    def __del__(self) -> None:
        # A graph that is freed before its backward does not need the file.
        if not self.written.cancel() and self.written.exception() is None:
            self.written.result().close()


class _Window:
    """A limit on the bytes that are being written at a time. A larger item waits until it is alone."""

    def __init__(self, num_bytes: int) -> None:
        self._limit = num_bytes
        self._inside = 0
        self._changed = threading.Condition()

    def enter(self, num_bytes: int) -> None:
        """Block until `num_bytes` fit below the limit, and count them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._inside or self._inside + num_bytes <= self._limit)
            self._inside += num_bytes

    def leave(self, num_bytes: int) -> None:
        with self._changed:
            self._inside -= num_bytes
            self._changed.notify_all()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def make_offload(plan: Plan, device: Device, arena: HostArena) -> Offload | None:
    """Return the offloading of activations; `None` if the plan offloads none.

    Args:
        plan: the plan.
        device: the device that computes.
        arena: page-locked host memory, for a device with separate memory.
    """
    if not any(policy.is_offloaded for policy in plan.activations):
        return None
    if not device.reads_host:
        return HostOffload(device, arena)
    return DiskOffload(plan.folder)
