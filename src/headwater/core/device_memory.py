"""Memory of an accelerator: the errors that mean that it is full."""

from __future__ import annotations

import torch


def is_out_of_memory(error: RuntimeError) -> bool:
    """True if an error of torch means that a device has no memory left, for tensors or for code."""
    return isinstance(error, torch.OutOfMemoryError) or "CUDA error: out of memory" in str(error)
