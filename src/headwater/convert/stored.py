"""Tensors of a checkpoint in Hugging Face's format, each read on demand."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from headwater.convert.shards import has_weights, weight_files
from headwater.core.errors import CheckpointError
from headwater.core.file_tensor import FileTensor
from headwater.core.pickles import load_pickled
from headwater.core.safetensors import TensorFile

PICKLED_FILE = "pytorch_model.bin"
"""Weight file of older checkpoints; it is read without running code from it."""


def stored_tensors(folder: Path) -> Iterator[FileTensor]:
    """Yield the tensors of a folder's safetensors files, or of `pytorch_model.bin` if it lacks those.

    Raises:
        CheckpointError: if the folder lacks weights, or a file is damaged or has objects other than tensors.
    """
    if has_weights(folder, PICKLED_FILE) and not has_weights(folder):
        for path in weight_files(folder, PICKLED_FILE):
            yield from _in_pickle(path)
    else:
        for path in weight_files(folder):
            yield from in_file(TensorFile(path))


def in_file(file: TensorFile) -> Iterator[FileTensor]:
    """Yield the tensors of a safetensors file."""
    for name, place in file.places.items():
        yield FileTensor(name, tuple(place.shape), place.dtype, partial(file.read_whole, name))


def pickled_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file written by `torch.save`, by name.

    Raises:
        CheckpointError: if the file is damaged or holds other objects than tensors by name.
    """
    state = load_pickled(path)
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise CheckpointError(
            "expected a file that holds tensors by name, such as a state_dict",
            where=str(path),
            remedy="load it with headwater.load, and write its state_dict with save_pretrained",
        )
    return state


def _in_pickle(path: Path) -> Iterator[FileTensor]:
    for name, tensor in pickled_tensors(path).items():
        yield FileTensor(name, tuple(tensor.shape), tensor.dtype, partial(_copy, tensor))


def _copy(tensor: Tensor) -> Tensor:
    # A copy: the tensor may be mapped from the file, and may be a view that is not contiguous.
    return tensor.detach().clone(memory_format=torch.contiguous_format)
