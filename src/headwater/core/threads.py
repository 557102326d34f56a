"""Threads that compute on one core each, beside other threads that compute on all."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

_OPENMP_LIBRARIES = ("libgomp", "libiomp5", "libomp")


def single_core_pool(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of threads whose torch operators use one core each.

    Operators that divide their work among cores meet at a barrier. If other work uses the same cores, most of
    the time is spent at that barrier. Without a known OpenMP library operators still divide their work.
    """
    return ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=_use_one_core)


@contextmanager
def one_core() -> Iterator[None]:
    """Make torch operators in the calling thread use one core inside the context.

    For work on many small blocks beside threads that read, write and compute checksums: these use the other
    cores, and the operators would wait for them at the barrier of each block. See `single_core_pool`.
    """
    before = torch.get_num_threads()
    _use_one_core()
    try:
        yield
    finally:
        _use_cores(before)


def _use_one_core() -> None:
    """Make torch operators in the calling thread use one core. Other threads are not changed."""
    torch.get_num_threads()  # at a thread's first use torch sets its own number, so this call comes first
    _use_cores(1)


def _use_cores(count: int) -> None:
    library = _openmp()
    if library is not None:
        library.omp_set_num_threads(count)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    path = openmp_library()
    return None if path is None else ctypes.CDLL(str(path))


def openmp_library() -> Path | None:
    """Return the path of the OpenMP library that torch has loaded, if it is found."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    # The library that is loaded: another copy of OpenMP would have its own number of threads.
    loaded = {line.split()[-1] for line in maps.read_text().splitlines()}
    return next((Path(path) for path in sorted(loaded) if _is_openmp(path)), None)


def _is_openmp(path: str) -> bool:
    return Path(path).name.startswith(_OPENMP_LIBRARIES)
