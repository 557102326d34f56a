"""Batches of any kind: tensors in any nesting, whose first dimension is the sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from headwater.core.errors import DataError
from headwater.core.trees import map_tensors, tensors_in


def num_samples(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor.

    Raises:
        DataError: if there is no tensor in it.
    """
    for tensor in tensors_in(batch):
        if tensor.dim():
            return len(tensor)
    raise DataError(
        f"a batch holds no tensor with a dimension for its samples, it is a {type(batch).__name__}",
        where="data loader",
        remedy="let the loader give tensors [batch, …], alone or in tuples, lists and dictionaries",
    )


def split_batch(batch: Any, size: int) -> Iterator[Any]:
    """`batch` in micro-batches of `size` samples; the last one has what remains.

    Tensors that have another first dimension than the samples are in each of them whole.
    """
    samples = num_samples(batch)
    if samples <= size:
        yield batch
        return
    for start in range(0, samples, size):
        part = slice(start, start + size)

        def cut(tensor: torch.Tensor, part: slice = part) -> torch.Tensor:
            return tensor[part] if tensor.dim() and len(tensor) == samples else tensor

        yield map_tensors(cut, batch)
