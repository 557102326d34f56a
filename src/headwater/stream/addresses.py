"""Addresses of parameters and of optimizer state whose values are in the weight store.

[Note: addresses]
In plain PyTorch the values of a parameter have one address. Libraries use it as a key of a dictionary, find
parameters that share memory by it, or read the values there, as safetensors does. The store has no such
memory. So the first request for an address reserves virtual memory of the size of the parameter, which other
parameters never get. It is host memory, also for parameters on a GPU. A request copies the values to it if
they have changed since the last copy. Before the next forward this memory is freed, but it stays reserved:
the parameter keeps its address. The storage of the parameter is this memory too, which is not freed as long
as the storage is used. A thread may save a model while another one trains. So a forward frees no memory that
other threads have asked for, unless they have ended or the values have changed.

`torch.save` and similar functions keep the storages of all tensors until they have written them. So a large
copy is put into a file if the backend names a disk. The system then needs no memory for all copies at once.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from typing import TYPE_CHECKING, Protocol, final

import psutil
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from headwater.core.errors import StreamError
from headwater.core.interrupts import uninterrupted
from headwater.core.mapped_memory import reserve, unmap_file
from headwater.core.modes import apart_from_modes
from headwater.plan.cgroups import memory_room

if TYPE_CHECKING:
    from headwater.core.stage import ParamSpec
    from headwater.stream.home import ValuesVersion


class StoredPlace(Protocol):
    """The place in the weight store of the values of a parameter or of a tensor of optimizer state.

    Attributes:
        spec: the parameter.
        meta: a tensor of the same shape, strides and dtype on the meta device.
        version: the version of the present values.
    """

    @property
    def spec(self) -> ParamSpec: ...

    @property
    def meta(self) -> torch.Tensor: ...

    @property
    def version(self) -> ValuesVersion: ...

    def read_on_host(self) -> torch.Tensor:
        """Return a copy of the values in host memory."""

    def put_copy_in_file(self, memory: mmap.mmap) -> bool:
        """Put reserved memory for a copy of the values into a file, or return False to keep it in memory."""


@final
class Reserved:
    """Virtual memory for the values of one tensor. It takes room only while it holds a copy of them.

    Attributes:
        size: the number of bytes.
    """

    def __init__(self, size: int) -> None:
        self._memory = reserve(size)
        self._is_in_file = False
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._holds: ValuesVersion | None = None
        self._readers: set[threading.Thread] = set()  # threads that may read the values
        self._changing = threading.Lock()  # held while the memory is filled or freed
        self._storage: weakref.ref[torch.UntypedStorage] | None = None
        self.size = size

    def fill(self, home: StoredPlace) -> torch.UntypedStorage:
        """Copy the values here, in the order in which they are in memory, if they have changed.

        Returns:
            The memory as a storage, which callers only read. It is not freed as long as the storage is used.

        Raises:
            StreamError: if the machine has too little free memory for a copy of the values.
        """
        with _lock:
            # This is first: from here on forwards in other threads do not free the values.
            self._readers.add(threading.current_thread())
            _filled.add(self)
            # Another thread may change the values and then free them: a storage that is used prevents this.
            storage = self._used_storage()
        with self._changing:
            version = home.version
            if self._holds != version:
                if self._holds is None:
                    self._is_in_file = home.put_copy_in_file(self._memory)
                    if not self._is_in_file:
                        _check_room(home, self.size)
                values = home.read_on_host()
                self._bytes.view(values.dtype).as_strided(values.shape, values.stride()).copy_(values)
                self._holds = version
        return storage

    def _used_storage(self) -> torch.UntypedStorage:
        """Return the storage of the memory that callers use; a new one if they use none."""
        found = None if self._storage is None else self._storage()
        # torch moves a storage to other memory when another process shares it.
        if found is None or found.data_ptr() != self._bytes.data_ptr():
            # Made from a new tensor, because the storage of `_bytes` does not end when its users drop it.
            found = torch.frombuffer(self._memory, dtype=torch.uint8).untyped_storage()
            self._storage = weakref.ref(found)
        return found

    def free(self) -> None:
        """Free the memory, unless it may be read. It stays reserved, and then holds zeros."""
        if self._may_be_read() or not self._changing.acquire(blocking=False):
            return
        try:
            if self._is_in_file:
                unmap_file(self._memory)
                self._is_in_file = False
            else:
                self._memory.madvise(mmap.MADV_DONTNEED)
            self._holds = None
            self._readers.clear()
            _filled.discard(self)
        finally:
            self._changing.release()

    def leave_file(self) -> None:
        """Drop a copy in a file. A forked process calls this, because its parent writes to the file too."""
        if self._is_in_file:
            unmap_file(self._memory)
            self._is_in_file, self._holds = False, None

    def _may_be_read(self) -> bool:
        """True if the storage is used, or if another thread has asked for values that are still present."""
        if self._storage is not None and self._storage() is not None:
            return True
        others = self._readers - {threading.current_thread()}
        if not any(thread.is_alive() for thread in others):
            return False
        return self._holds is None or self._holds.is_present


_reserved = WeakTensorKeyDictionary()
"""Parameter -> name of a tensor of its optimizer state, or `None` for its values -> `Reserved`."""
_filled: weakref.WeakSet[Reserved] = weakref.WeakSet()
"""The memory that holds copies of values now."""
_lock = threading.Lock()
"""Guards the two collections, and the change from used to free memory."""


@uninterrupted  # otherwise Ctrl-C could leave memory in a file that `free` takes for memory in RAM
def reserved_storage(param: torch.Tensor, state: str | None, home: StoredPlace) -> torch.UntypedStorage:
    """Return the memory that is reserved for a tensor at rest, which callers only read.

    It has the values until the next forward, and as long as the storage is used; see [Note: addresses].

    Args:
        param: the parameter.
        state: the name of a tensor of its optimizer state; `None` for its values.
        home: the place of its values; at least one value.

    Raises:
        StreamError: if the machine has too little free memory for a copy of the values.
    """
    size = home.meta.nbytes
    with apart_from_modes():
        with _lock:
            by_state = _reserved.setdefault(param, {})
            found: Reserved | None = by_state.get(state)
            if found is None or found.size != size:
                found = by_state[state] = Reserved(size)
        return found.fill(home)


def reserved_tensor(param: torch.Tensor, state: str | None, home: StoredPlace) -> torch.Tensor | None:
    """Return a plain tensor over the memory of `reserved_storage`, which callers only read.

    Args:
        param: see `reserved_storage`.
        state: see `reserved_storage`.
        home: see `reserved_storage`.

    Returns:
        The tensor, in host memory; `None` if it has no elements.
    """
    meta = home.meta
    if not meta.numel():
        return None
    storage = reserved_storage(param, state, home)
    with apart_from_modes():
        return torch.empty(0, dtype=meta.dtype, device="cpu").set_(storage, 0, meta.shape, meta.stride())


def _check_room(home: StoredPlace, size: int) -> None:
    free = psutil.virtual_memory().available
    room = memory_room()  # free memory of the container
    if size > (free if room is None else min(free, room)) // 2:
        raise StreamError(
            f"data_ptr(), untyped_storage() or pickling would copy {size / 2**30:.1f} GiB, more than half of "
            "the memory that is free; copies of other tensors are freed before the next forward",
            where=f"{home.spec.name}, a tensor of shape {list(home.meta.shape)}",
            remedy="name a disk in headwater.backend, or write weights with headwater.save or "
            "headwater.save_pretrained; compare parameters by id()",
        )


def free_copies() -> None:
    """Free the copies of values at the addresses of all parameters, except for those that may be read."""
    if _filled:
        with _lock:
            for reserved in list(_filled):
                reserved.free()


def _begin_fork() -> None:
    for reserved in list(_filled):
        reserved.leave_file()


os.register_at_fork(after_in_child=_begin_fork)


def forget_address(param: torch.Tensor) -> None:
    """Free the addresses of a parameter that is no longer at rest, and of its optimizer state."""
    _reserved.pop(param, None)
