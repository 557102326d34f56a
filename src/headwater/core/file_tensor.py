"""A tensor in a file, whatever the format of the file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor in a file, whose values are read only on request.

    Attributes:
        name: name in the file.
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        read: reads the values. Raises `CheckpointError` if the file is damaged.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Size of the values in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize
