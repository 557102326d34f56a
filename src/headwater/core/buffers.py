"""Page-aligned host buffers, and settings of the memory allocator."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import sys
from collections.abc import Callable, Sequence

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

PAGE_BYTES = 4096
"""The multiple that direct disk transfers need for buffer address, file offset and length, in bytes."""

_HUGE_PAGE_BYTES = 2 << 20
LARGE_BLOCK_BYTES = 1 << 20
"""Blocks of at least this size are returned to the system at once, if `tune_malloc` was told not to keep
them."""
_OWN_PAGES_BYTES = 32 << 20
_MADV_DONTFORK, _MADV_DOFORK, _MADV_HUGEPAGE = 10, 11, 14


def round_up(count: int, multiple: int = PAGE_BYTES) -> int:
    """Return the smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def round_down(count: int, multiple: int = PAGE_BYTES) -> int:
    """Return the largest multiple of `multiple` that is at most `count`."""
    return count // multiple * multiple


def aligned_empty(num_bytes: int) -> torch.Tensor:
    """Allocate a page-aligned uint8 tensor of zeros in a memory mapping that only this tensor uses.

    The pages go back to the system as soon as the last view of the tensor is gone.

    Args:
        num_bytes: rounded up to whole pages; 0 means one page.
    """
    size = max(round_up(num_bytes), PAGE_BYTES)
    # Not `torch.empty`, whose memory is not page-aligned and may stay with malloc.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages works as well, only slower
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def aligned_temporary(num_bytes: int) -> torch.Tensor:
    """Return a page-aligned, uninitialised uint8 tensor for a short use.

    The memory comes from the ranges of `core.tensor_memory` if torch's tensors use them. Then it reuses what
    freed tensors have left, where `aligned_empty` would take new pages.

    Args:
        num_bytes: rounded up to whole pages; 0 means one page.
    """
    if _MALLOC.has_large_tensors:
        return aligned_empty(num_bytes)
    size = max(round_up(num_bytes), PAGE_BYTES)
    memory = torch.empty(size + PAGE_BYTES, dtype=torch.uint8, device="cpu")
    begin = -memory.data_ptr() % PAGE_BYTES
    return memory[begin : begin + size]


def large_empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor. If torch's tensors come from malloc, a large one gets its own mapping.

    The mapping is freed with the tensor. If malloc keeps freed memory (see `tune_malloc`), small blocks are
    placed in the hole that a large one leaves, and the next large tensor takes new memory.
    """
    if _uses_own_pages(shape, dtype):
        return _mapped_zeros(shape, dtype)
    return torch.empty(shape, dtype=dtype, device="cpu")


def large_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros, whose memory is allocated as in `large_empty`."""
    if _uses_own_pages(shape, dtype):
        return _mapped_zeros(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device="cpu")


def _uses_own_pages(shape: Sequence[int], dtype: torch.dtype) -> bool:
    # A mapping for each small tensor would cost more than the holes.
    return _MALLOC.has_large_tensors and math.prod(shape) * dtype.itemsize >= _OWN_PAGES_BYTES


def _mapped_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    num_bytes = math.prod(shape) * dtype.itemsize
    return aligned_empty(num_bytes)[:num_bytes].view(dtype).view(shape)


class _Malloc:
    """Holds the settings of `tune_malloc`.

    Attributes:
        pools_keep: pools of scratch memory keep blocks that are not in use.
        has_large_tensors: torch's large tensors have their memory from malloc.
    """

    pools_keep = True
    has_large_tensors = True


_MALLOC = _Malloc()


def pools_keep() -> bool:
    """True if a pool of scratch memory keeps idle blocks; see `tune_malloc`."""
    return _MALLOC.pools_keep


def tune_malloc(*, keep: bool, has_large_tensors: bool = True) -> bool:
    """Set whether glibc's malloc keeps large blocks that are freed.

    A newly mapped page costs a page fault and its clearing, and a training step allocates gigabytes of
    temporaries. With ample memory it is faster to keep freed blocks. With little memory they should be
    returned. The default of malloc is neither: it begins to keep blocks of up to 32 MiB after such blocks
    were freed, so its memory cannot be predicted. Measured effects: see docs/benchmarks.md and docs/log.md.

    Args:
        keep: keep every freed block; otherwise blocks of 1 MiB and more are returned to the system at once.
            Pools of scratch memory follow the same setting.
        has_large_tensors: torch's large tensors have their memory from malloc; see `tune_allocator`.

    Returns:
        True if the C library has the setting (glibc does).
    """
    _MALLOC.pools_keep, _MALLOC.has_large_tensors = keep, has_large_tensors
    mallopt = _glibc("mallopt")
    if mallopt is None:
        return False
    # The largest value that `mallopt` takes.
    threshold = 2**31 - 1 if keep else LARGE_BLOCK_BYTES
    trim_threshold, mmap_threshold = -1, -3
    return bool(mallopt(mmap_threshold, threshold)) and bool(mallopt(trim_threshold, threshold))


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask the system to use huge pages for a large host tensor that was not written to yet.

    The first write to a page of 4 KiB causes a page fault, which takes longer than the write: docs/log.md.
    """
    # Fake tensors of a dry run, and those that a transform of `torch.func` wraps, have no memory.
    if type(tensor) is not torch.Tensor or is_functorch_wrapped_tensor(tensor):
        return
    begin = round_up(tensor.data_ptr(), _HUGE_PAGE_BYTES)
    length = round_down(tensor.data_ptr() + tensor.nbytes, _HUGE_PAGE_BYTES) - begin
    madvise = _glibc("madvise")
    if madvise is not None and length >= _HUGE_PAGE_BYTES:
        # A kernel without huge pages refuses the advice, and all works as well, only slower.
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), _MADV_HUGEPAGE)


def set_copied_by_fork(memory: torch.Tensor, copied: bool) -> None:
    """Set whether a fork of this process gets a copy of `memory`, which must be page-aligned.

    Without a copy the fork cannot read the memory: an attempt kills the fork (SIGSEGV).
    """
    madvise = _glibc("madvise")
    if madvise is not None and memory.nbytes:
        pages = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(round_up(memory.nbytes))
        # A kernel that refuses the advice copies the memory, which is right, only slower.
        madvise(*pages, _MADV_DOFORK if copied else _MADV_DONTFORK)


def return_pages() -> bool:
    """Return free memory from malloc to the operating system; see `tune_malloc`.

    Returns:
        True if there was any.
    """
    malloc_trim = _glibc("malloc_trim")
    return malloc_trim is not None and bool(malloc_trim(0))


@functools.cache
def _glibc(function: str) -> Callable[..., int] | None:
    """Return a function of the C library; `None` if it has no such function."""
    return getattr(ctypes.CDLL(None), function, None) if sys.platform.startswith("linux") else None
