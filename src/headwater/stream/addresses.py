"""Addresses of parameters whose values are in the weight store.

[Note: addresses]
In plain PyTorch the values of a parameter have one address. Libraries use it as a key of a dictionary, find
parameters that share memory by it, or read the values there, as safetensors does. The store has no such
memory. So the first request for an address reserves virtual memory of the size of the parameter, which other
parameters never get. A request copies the values to it if they have changed since the last copy. Before the
next forward this memory is freed, but it stays reserved: the parameter keeps its address. The storage of the
parameter is this memory too, which is not freed as long as the storage is used.
"""

from __future__ import annotations

import mmap
import weakref
from typing import TYPE_CHECKING, final

import psutil
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from headwater.core.errors import StreamError
from headwater.core.modes import apart_from_modes
from headwater.plan.cgroups import memory_room

if TYPE_CHECKING:
    from headwater.stream.home import Home

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


@final
class Reserved:
    """Virtual memory for the values of one parameter. It takes memory only while it holds a copy of them.

    Attributes:
        address: the address of the memory.
        size: the number of bytes.
    """

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size, flags=_FLAGS)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._holds: tuple[Home, int] | None = None  # the place of the values, and their version
        self._storage: weakref.ref[torch.UntypedStorage] | None = None
        self.address, self.size = self._bytes.data_ptr(), size

    def fill(self, home: Home) -> None:
        """Copy the values here, in the order in which they are in memory, if they have changed.

        Raises:
            StreamError: if the machine has too little free memory for a copy of the values.
        """
        wanted = home, home.version
        if self._holds != wanted:
            if self._holds is None:
                _check_room(home, self.size)
            values = home.read()
            self._bytes.view(values.dtype).as_strided(values.shape, values.stride()).copy_(values)
            self._holds = wanted
            _filled.add(self)

    def storage(self) -> torch.UntypedStorage:
        """Return the memory as a storage, which callers only read."""
        found = None if self._storage is None else self._storage()
        if found is None:
            # Made from a new tensor, because a storage of `_bytes` would not end when its users release it.
            found = torch.frombuffer(self._memory, dtype=torch.uint8).untyped_storage()
            self._storage = weakref.ref(found)
        return found

    def free(self) -> None:
        """Free the memory, unless its storage is used. It stays reserved, and then holds zeros."""
        if self._storage is None or self._storage() is None:
            self._memory.madvise(mmap.MADV_DONTNEED)
            self._holds = None
            _filled.discard(self)


_reserved = WeakTensorKeyDictionary()
"""Parameter -> its `Reserved`."""
_filled: weakref.WeakSet[Reserved] = weakref.WeakSet()
"""The memory that holds copies of values now."""


def reserved_memory(param: torch.Tensor, home: Home) -> Reserved:
    """Return the memory that is reserved for a parameter at rest. It has the values until the next forward.

    See [Note: addresses].

    Args:
        param: the parameter.
        home: the place of its values, on the CPU; at least one value.

    Raises:
        StreamError: if the machine has too little free memory for a copy of the values.
    """
    size = home.meta.nbytes
    with apart_from_modes():
        found: Reserved | None = _reserved.get(param)
        if found is None or found.size != size:
            found = _reserved[param] = Reserved(size)
        found.fill(home)
    return found


def _check_room(home: Home, size: int) -> None:
    free = psutil.virtual_memory().available
    room = memory_room()  # free memory of the container
    if size > (free if room is None else min(free, room)) // 2:
        raise StreamError(
            f"data_ptr() or untyped_storage() would copy {size / 2**30:.1f} GiB, more than half of the "
            "memory that is free; copies at other addresses are freed before the next forward",
            where=f"{home.spec.name}, a parameter of shape {list(home.spec.shape)}",
            remedy="write weights with headwater.save or headwater.save_pretrained, and compare parameters "
            "by id()",
        )


def free_copies() -> None:
    """Free the copies of values at the addresses of all parameters, except for those that are used."""
    for reserved in list(_filled):
        reserved.free()


def forget_address(param: torch.Tensor) -> None:
    """Free the address of a parameter that is no longer at rest."""
    _reserved.pop(param, None)
