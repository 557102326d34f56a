"""Functions on batches: tensors, in any nesting, whose first dimension counts samples."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch

from headwater.core.errors import ConfigError, DataError
from headwater.core.trees import map_tensors, tensors_in

IGNORED = -100
"""Label of a position that does not count in a loss, as in torch and the transformers library."""

_LOOKED_AT_BYTES = 1 << 16
"""The number of bytes at the beginning of each tensor that `fingerprint` reads."""


def num_samples(batch: Any) -> int:
    """Return the number of samples in a batch: the first dimension of its first tensor.

    Raises:
        DataError: if the batch holds no tensor with a dimension.
    """
    for tensor in tensors_in(batch):
        if tensor.dim():
            return len(tensor)
    raise DataError(
        f"expected a batch with a tensor [batch, …], got a {type(batch).__name__} without one",
        where="data loader",
        remedy="let the loader return tensors [batch, …], alone or in tuples, lists and dictionaries",
    )


def split_batch(batch: Any, size: int) -> Iterator[Any]:
    """Yield micro-batches of `size` samples; the last one has the remaining samples.

    A tensor whose first dimension is not the number of samples is whole in every micro-batch.
    """
    samples = num_samples(batch)
    if samples <= size:
        yield batch
        return
    for start in range(0, samples, size):
        yield slice_batch(batch, start, start + size)


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Return the samples [start, stop) of a batch; tensors with another first dimension stay whole.

    Args:
        batch: nested tensors.
        start: the first sample.
        stop: one past the last sample.
    """
    samples = num_samples(batch)
    # A view: micro-batches share the memory of the batch.
    return map_tensors(lambda t: t[start:stop] if t.dim() and len(t) == samples else t, batch)


def fingerprint(batch: Any) -> int:
    """Return a checksum of the first bytes of each tensor in a batch, to tell whether two batches differ."""
    mark = 0
    for tensor in tensors_in(batch):
        count = max(_LOOKED_AT_BYTES // max(tensor.element_size(), 1), 1)
        begin = tensor.detach().cpu().reshape(-1)[:count].contiguous()
        mark = zlib.crc32(begin.view(torch.uint8).numpy().tobytes(), mark)
    return mark


def equal_share(batch_size: int, num_ranks: int) -> int:
    """Return how many samples of a batch each rank computes.

    Raises:
        ConfigError: if the batch size is not a multiple of the number of ranks.
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
