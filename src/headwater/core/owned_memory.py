"""References to the memory of a tensor, and the part of that memory that is resident."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import torch

_ENTRY_BYTES = 8
_MOST_ENTRIES = 1 << 20
# Bits of an entry of /proc/PID/pagemap. The page is in memory; it belongs to a file or to shared memory.
_PRESENT, _SHARED = 63, 61


def storage_references(tensor: torch.Tensor) -> int:
    """Return the number of references to the storage of a dense tensor; see `ONLY_OWNER`."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


ONLY_OWNER = storage_references(torch.empty(0, device="cpu"))
"""Number of references to a storage that only one tensor uses."""


def private_resident_bytes(ranges: Iterable[tuple[int, int]]) -> int:
    """Return the bytes of memory ranges that are resident, and belong to this process alone.

    Pages of files and of shared memory do not count. The result is 0 where the page table cannot be read.

    Args:
        ranges: pairs of an address and a number of bytes.
    """
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            return sum(_resident(pagemap.fileno(), address, size) for address, size in ranges)
    except OSError:  # no Linux, or a sandbox without this file
        return 0


def _resident(pagemap: int, address: int, num_bytes: int) -> int:
    # Pages that lie only partly in the range are left out.
    page, end = -(-address // mmap.PAGESIZE), (address + num_bytes) // mmap.PAGESIZE
    count = 0
    while page < end:
        size = min(end - page, _MOST_ENTRIES) * _ENTRY_BYTES
        entries = os.pread(pagemap, size, page * _ENTRY_BYTES)
        if not entries:
            break
        found = torch.frombuffer(bytearray(entries), dtype=torch.int64)
        count += int(((found >> _PRESENT & 1) & ~(found >> _SHARED)).sum())
        page += len(found)
    return count * mmap.PAGESIZE
