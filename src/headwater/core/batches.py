"""Batches of any kind: tensors in any nesting, whose first dimension is the sample."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch

from headwater.core.errors import ConfigError, DataError
from headwater.core.trees import map_tensors, tensors_in

_LOOKED_AT_BYTES = 1 << 16
"""So much of each tensor tells batches apart."""


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
        yield slice_batch(batch, start, start + size)


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """The samples [start, stop) of a batch; tensors with another first dimension stay whole."""
    samples = num_samples(batch)
    return map_tensors(lambda t: t[start:stop] if t.dim() and len(t) == samples else t, batch)


def fingerprint(batch: Any) -> int:
    """Tells batches apart, by the beginning of each of their tensors."""
    mark = 0
    for tensor in tensors_in(batch):
        count = max(_LOOKED_AT_BYTES // max(tensor.element_size(), 1), 1)
        begin = tensor.detach().cpu().reshape(-1)[:count].contiguous()
        mark = zlib.crc32(begin.view(torch.uint8).numpy().tobytes(), mark)
    return mark


def equal_share(batch_size: int, num_ranks: int) -> int:
    """The samples of a batch that each of so many ranks computes.

    Raises:
        ConfigError: if it cannot be divided so.
    """
    if batch_size % num_ranks:
        below = batch_size - batch_size % num_ranks
        near = " or ".join(str(size) for size in (below, below + num_ranks) if size)
        raise ConfigError(
            f"batch_size {batch_size} cannot be divided evenly among {num_ranks} ranks",
            where="batch_size",
            remedy=f"write {near}",
        )
    return batch_size // num_ranks
