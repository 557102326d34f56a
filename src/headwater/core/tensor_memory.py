"""Memory of CPU tensors: from malloc, or from the ranges of `native/tensor_memory.cpp`.

[Note: memory of tensors] A step allocates and frees gigabytes. New pages cost page faults, so freed memory
should be kept, but malloc then holds a quarter more than the tensors need, or more, and how much more cannot
be predicted. The ranges keep freed memory too, but hold at most a twentieth more than the tensors took at
their peak. They need a compiler for C++ and the headers of torch. Without these malloc keeps freed blocks if
memory is ample, and returns them otherwise; see `tune_malloc`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from pathlib import Path

import torch

from headwater.core.buffers import return_pages, tune_malloc
from headwater.core.native import native_library


@dataclasses.dataclass(frozen=True)
class RangeBytes:
    """Bytes of the ranges.

    Attributes:
        used: bytes of tensors.
        free: bytes that are kept for later tensors.
        mapped: bytes of all mappings so far, also of those that were returned to the system.
    """

    used: int
    free: int
    mapped: int


def tensor_ranges_available() -> bool:
    """True if CPU tensors can have their memory in ranges; the first call may compile for some seconds."""
    return _library() is not None


def tune_allocator(*, keep: bool) -> None:
    """Choose where new CPU tensors of this process have their memory; see [Note: memory of tensors].

    The ranges then hold as much as the tensors of the next step need, and not what earlier work has needed.

    Args:
        keep: if malloc is used, keep every freed block.
    """
    library = _library()
    if library is None or not library.headwater_tensor_memory():
        tune_malloc(keep=keep)
        return
    _INSTALLED.library = library
    library.headwater_return_free()
    tune_malloc(keep=True, has_large_tensors=False)


def return_free_memory() -> None:
    """Return the memory of freed tensors to the system."""
    library = _INSTALLED.library
    if library is not None:
        library.headwater_return_free()
    return_pages()


def range_bytes() -> RangeBytes | None:
    """Return the bytes of the ranges, or `None` if `tune_allocator` has not put tensors into ranges."""
    library = _INSTALLED.library
    if library is None:
        return None
    counts = [ctypes.c_size_t() for _ in dataclasses.fields(RangeBytes)]
    library.headwater_count(*map(ctypes.byref, counts))
    return RangeBytes(*(count.value for count in counts))


class _Installed:
    """Holds the library of the ranges, after torch has been told to use it.

    Without this object, a process that never uses the ranges would compile them only to count their bytes.
    """

    library: ctypes.CDLL | None = None


_INSTALLED = _Installed()


@functools.cache
def _library() -> ctypes.CDLL | None:
    return native_library("tensor_memory", flags_for_torch())


def flags_for_torch() -> tuple[str, ...]:
    """Return the flags of a compiler for C++ code that uses classes of torch's library `c10`."""
    root = Path(torch.__file__).parent
    # The layout of torch's classes differs between builds. The definition makes each build another library.
    build = f"{torch.__version__} {torch.version.git_version}"
    return (
        f"-I{root / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f'-DHEADWATER_TORCH_BUILD="{build}"',
        str(root / "lib" / "libc10.so"),
    )
