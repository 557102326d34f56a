"""Files of `torch.save`, read without running code in them."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

from headwater.core.errors import CheckpointError


def load_pickled(path: Path, map_location: torch.device | str = "cpu") -> Any:
    """Load a file of `torch.save`. Tensors are mapped into memory if the format of the file allows it.

    Raises:
        CheckpointError: if the file is damaged, or holds more than tensors and plain values.
    """
    try:
        return torch.load(path, map_location, weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"the file holds more than tensors and plain values, and such a pickle can run any code: {error}",
            where=str(path),
            remedy="if you trust it, torch.load(path, weights_only=False), then save its state_dicts",
        ) from error
    except _DAMAGED as error:
        raise CheckpointError(
            f"the file cannot be read: {error}", where=str(path), remedy="copy or save it again"
        ) from error


_DAMAGED = (
    RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, TypeError, AttributeError,
    AssertionError, OverflowError, MemoryError, struct.error, zipfile.BadZipFile,
)  # fmt: skip
"""Errors that torch.load raises for a damaged file."""
