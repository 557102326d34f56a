"""Threads that leave cores to others: they compute on one core each, or on most cores."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_LEFT = 8
"""Beside a GPU, updates leave every eighth core free. With fewer than eight cores they use all."""


@contextmanager
def one_core() -> Iterator[None]:
    """Make torch operators in the calling thread use one core inside the context.

    For work on many small blocks beside threads that read, write and compute checksums: these use the other
    cores, and the operators would wait for them at the barrier of each block. See `single_core_pool`.
    """
    before = torch.get_num_threads()
    use_one_core()
    try:
        yield
    finally:
        _use_cores(before)


def use_one_core() -> None:
    """Make torch operators in the calling thread use one core. Other threads are not changed."""
    torch.get_num_threads()  # at a thread's first use torch sets its own number, so this call comes first
    _use_cores(1)


def leave_cores() -> None:
    """Make torch operators in the calling thread leave every eighth core free."""
    cores = torch.get_num_threads()  # see `use_one_core`
    _use_cores(cores - cores // _LEFT)


def _use_cores(count: int) -> None:
    library = _openmp()
    if library is not None:
        library.omp_set_num_threads(count)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """Return a library in which the functions of OpenMP are those that torch calls; `None` without OpenMP.

    A process may have loaded several copies of OpenMP: the wheel of scikit-learn, for example, has its own.
    """
    # The order in which the dynamic linker looks for the functions that torch calls.
    for place in (None, Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"):
        with suppress(OSError):
            library = ctypes.CDLL(None if place is None else str(place))
            if hasattr(library, "omp_set_num_threads"):
                return library
    return None


def openmp_library() -> Path | None:
    """Return the path of the OpenMP library that torch uses, if it is found."""
    library, maps = _openmp(), Path("/proc/self/maps")
    if library is None or not maps.exists():
        return None
    address = ctypes.cast(library.omp_set_num_threads, ctypes.c_void_p).value
    assert address is not None, "a function that was found has an address"
    for line in maps.read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        start, stop = (int(part, 16) for part in span.split("-"))
        if start <= address < stop:
            return Path(path)
    return None
