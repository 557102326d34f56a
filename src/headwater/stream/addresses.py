"""Addresses of parameters whose values are in the weight store.

[Note: addresses]
In plain PyTorch the values of a parameter have one address. Libraries use it as a key of a dictionary, find
parameters that share memory by it, or read the values there, as safetensors does. The store has no such
memory. So the first request for an address reserves virtual memory of the size of the parameter, which other
parameters never get. Each request copies the present values to it. Before the next forward this memory is
freed, but it stays reserved: the parameter keeps its address.
"""

from __future__ import annotations

import mmap
from typing import final

import psutil
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from headwater.core.errors import StreamError
from headwater.core.modes import apart_from_modes
from headwater.plan.cgroups import memory_room

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)


@final
class _Reserved:
    """Virtual memory for the values of one parameter. It takes memory only while it holds a copy of them.

    Attributes:
        address: the address of the memory.
        size: the number of bytes.
    """

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size, flags=_FLAGS)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.address, self.size = self._bytes.data_ptr(), size

    def fill(self, values: torch.Tensor) -> None:
        """Copy dense values here, in the order in which they are in memory."""
        self._bytes.view(values.dtype).as_strided(values.shape, values.stride()).copy_(values)

    def free(self) -> None:
        """Free the memory, which stays reserved and then holds zeros."""
        self._memory.madvise(mmap.MADV_DONTNEED)


_reserved = WeakTensorKeyDictionary()
"""Parameter -> its `_Reserved`."""
_filled: set[_Reserved] = set()
"""The memory that holds copies of values now."""


def address_of(param: torch.Tensor, values: torch.Tensor) -> int:
    """Return the address of a parameter at rest. Its values are there until the next forward.

    See [Note: addresses].

    Args:
        param: the parameter.
        values: its present values, dense; at least one.

    Raises:
        StreamError: if the machine has too little free memory for a copy of the values.
    """
    free = psutil.virtual_memory().available
    room = memory_room()  # free memory of the container
    if values.nbytes > (free if room is None else min(free, room)) // 2:
        raise StreamError(
            f"data_ptr() would copy {values.nbytes / 2**30:.1f} GiB to the address, more than half of the "
            "memory that is free; copies at other addresses are freed before the next forward",
            where=f"a parameter of shape {list(values.shape)}",
            remedy="compare parameters by id(), and read their values by model.state_dict()",
        )
    with apart_from_modes():
        reserved: _Reserved | None = _reserved.get(param)
        if reserved is None or reserved.size != values.nbytes:
            reserved = _reserved[param] = _Reserved(values.nbytes)
        reserved.fill(values)
    _filled.add(reserved)
    return reserved.address


def free_copies() -> None:
    """Free the copies of values at the addresses of all parameters."""
    while _filled:
        _filled.pop().free()


def forget_address(param: torch.Tensor) -> None:
    """Free the address of a parameter that is no longer at rest."""
    _filled.discard(_reserved.pop(param, None))
