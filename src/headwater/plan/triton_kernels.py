"""Triton kernels in a dry run. They need a GPU, but the tensors of a dry run are in host memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor


@contextmanager
def without_triton_kernels() -> Iterator[None]:
    """Enter a context in which Triton kernels do nothing when they get fake tensors.

    A kernel writes its results to tensors that exist before, so the rest of the dry run does not need it. Its
    floating-point operations are not counted.
    """
    # Code that has Triton kernels has imported the package.
    kernels: Any = getattr(sys.modules.get("triton.runtime.jit"), "KernelInterface", None)
    if kernels is None:
        yield
        return
    with_grid = kernels.__getitem__

    def launcher(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Any:
            # Another thread may train with real tensors meanwhile.
            if not any(isinstance(value, FakeTensor) for value in (*args, *kwargs.values())):
                return with_grid(kernel, grid)(*args, **kwargs)
            return None

        return launch

    kernels.__getitem__ = launcher
    try:
        yield
    finally:
        kernels.__getitem__ = with_grid
