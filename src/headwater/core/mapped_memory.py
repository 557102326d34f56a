"""Virtual memory that is reserved first, and is in RAM or in a file later."""

from __future__ import annotations

import ctypes
import mmap
import os

_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
_MAP_FIXED = 0x10  # Python does not export it
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def reserve(size: int) -> mmap.mmap:
    """Reserve virtual memory of `size` bytes. Only pages that are written take memory."""
    return mmap.mmap(-1, size, flags=_RESERVED)


def map_file(memory: mmap.mmap, file: int) -> None:
    """Replace the content of reserved memory by that of a file, to which writes go from now on.

    The file takes no descriptor of the process: close yours. It is used until `unmap_file`, or until the
    memory ends.

    Args:
        memory: memory that `reserve` has returned.
        file: the descriptor of a file of the same size.

    Raises:
        OSError: if the system refuses. The memory is unchanged.
    """
    _map(memory, mmap.MAP_SHARED, file)


def unmap_file(memory: mmap.mmap) -> None:
    """Replace the content of memory in a file by zeros. The memory stays reserved."""
    _map(memory, _RESERVED, -1)


def _map(memory: mmap.mmap, flags: int, file: int) -> None:
    # The object `memory` still unmaps these addresses at its end.
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _libc.mmap(address, len(memory), _READ_WRITE, flags | _MAP_FIXED, file, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
