"""Page-aligned host buffers, and an allocator that keeps its pages."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Callable

import torch

PAGE_BYTES = 4096
"""Alignment of direct disk transfers: buffer address, file offset and length."""

_HUGE_PAGE_BYTES = 2 << 20


def round_up(count: int, multiple: int = PAGE_BYTES) -> int:
    """Smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def aligned_empty(num_bytes: int, *, pin: bool = False) -> torch.Tensor:
    """A uint8 tensor of `num_bytes` rounded up to whole pages, page-aligned, in pages of its own.

    The pages go back to the system as soon as the last view of the tensor is gone.

    Args:
        num_bytes: bytes wanted; 0 gives one page.
        pin: page-lock the memory, for asynchronous copies to a CUDA device.
    """
    size = max(round_up(num_bytes), PAGE_BYTES)
    if pin:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages works as well, only slower
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def keep_pages() -> bool:
    """Let glibc's malloc reuse large blocks instead of returning them to the system after each use.

    A freshly mapped page costs a fault and a clearing; a training step maps gigabytes of temporaries
    anew each time. Measured effect: see docs/benchmarks.md.

    Returns:
        Whether the C library has the setting (glibc does).
    """
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return False
    trim_threshold, mmap_threshold, largest = -1, -3, 2**31 - 1
    return bool(mallopt(mmap_threshold, largest)) and bool(mallopt(trim_threshold, largest))


def return_pages() -> bool:
    """Return the memory that malloc holds and nobody uses to the system; see `keep_pages`.

    Returns:
        Whether there was any.
    """
    malloc_trim = _glibc("malloc_trim")
    return malloc_trim is not None and bool(malloc_trim(0))


def _glibc(function: str) -> Callable[..., int] | None:
    """A function of the C library, if it is one that has it."""
    return getattr(ctypes.CDLL(None), function, None) if sys.platform.startswith("linux") else None
