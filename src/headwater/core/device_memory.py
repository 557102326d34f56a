"""Memory of an accelerator: the errors that mean that it is full, and the segments of torch's allocator.

[Note: segments that grow]
torch's allocator takes device memory in segments. A gap in a segment of a fixed size has no room for a larger
tensor, so after steps of different shapes the allocator holds much more than the tensors need. Segments that
grow (`expandable_segments`) avoid this. torch reads the setting once, when CUDA is initialised. A plan
initialises CUDA before its engine exists, because it measures the free memory. So the setting is also changed
in the running allocator.
"""

from __future__ import annotations

import os

import torch

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_GROWING = "expandable_segments:True"


def is_out_of_memory(error: RuntimeError) -> bool:
    """True if an error of torch means that a device has no memory left, for tensors or for code."""
    return isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(error)


def let_segments_grow() -> bool:
    """Make torch's allocator use segments that grow, unless the user has configured it. True if it uses them.

    See [Note: segments that grow]. This function does not initialise CUDA.
    """
    settings = [os.environ[name] for name in _VARIABLES if name in os.environ]
    if not settings:
        os.environ[_VARIABLES[0]] = _GROWING  # also for processes that this one starts
        if torch.cuda.is_initialized():
            torch._C._accelerator_setAllocatorSettings(_GROWING)
    return not settings or any(_GROWING.lower() in each.lower().replace(" ", "") for each in settings)
