"""Page-aligned host buffers, and what the allocator does with its pages."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Sequence

import torch

PAGE_BYTES = 4096
"""Alignment of direct disk transfers: buffer address, file offset and length."""

_HUGE_PAGE_BYTES = 2 << 20
_LARGE_BLOCK_BYTES = 1 << 20
_OWN_PAGES_BYTES = 32 << 20


def round_up(count: int, multiple: int = PAGE_BYTES) -> int:
    """Smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def aligned_empty(num_bytes: int) -> torch.Tensor:
    """A uint8 tensor of `num_bytes` rounded up to whole pages, page-aligned, in pages of its own.

    The pages go back to the system as soon as the last view of the tensor is gone.

    Args:
        num_bytes: bytes wanted; 0 gives one page.
    """
    size = max(round_up(num_bytes), PAGE_BYTES)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages works as well, only slower
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def large_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros, which lie in pages of their own where they are many: for large tensors that come and go.

    Where malloc keeps what is freed (see `tune_allocator`), a large block leaves a hole that smaller ones
    break up, and the next large one takes new memory.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _OWN_PAGES_BYTES:
        return torch.zeros(shape, dtype=dtype)
    return aligned_empty(num_bytes)[:num_bytes].view(dtype).view(shape)


class _Pools:
    """True if pools of scratch memory keep the blocks that are returned to them."""

    keep = True


_POOLS = _Pools()


def pools_keep() -> bool:
    """True if a pool of scratch memory keeps what is idle; see `tune_allocator`."""
    return _POOLS.keep


def tune_allocator(*, keep: bool) -> bool:
    """Fix what glibc's malloc does with large blocks that are freed.

    A freshly mapped page costs a fault and a clearing, and a training step maps gigabytes of temporaries
    anew: where memory is ample, blocks are best kept. Where it is not, they are best returned: by itself
    malloc begins to keep blocks of up to 32 MiB once such have been freed, and how much it then holds nobody
    can predict. Measured effects: see docs/benchmarks.md and docs/log.md.

    Args:
        keep: reuse every block, instead of returning those of 1 MiB and more to the system at once. Pools of
            scratch memory do the same.

    Returns:
        Whether the C library has the setting (glibc does).
    """
    _POOLS.keep = keep
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return False
    threshold = 2**31 - 1 if keep else _LARGE_BLOCK_BYTES
    trim_threshold, mmap_threshold = -1, -3
    return bool(mallopt(mmap_threshold, threshold)) and bool(mallopt(trim_threshold, threshold))


def return_pages() -> bool:
    """Return the memory that malloc holds and nobody uses to the system; see `tune_allocator`.

    Returns:
        Whether there was any.
    """
    malloc_trim = _glibc("malloc_trim")
    return malloc_trim is not None and bool(malloc_trim(0))


def _glibc(function: str) -> Callable[..., int] | None:
    """A function of the C library, if it is one that has it."""
    return getattr(ctypes.CDLL(None), function, None) if sys.platform.startswith("linux") else None
