"""Batches of a run: number of tokens, and division into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headwater.core.batches import num_samples
from headwater.core.errors import DataError


def num_tokens(batch: Any) -> int:
    """Return the tokens in a batch: the number of elements of its `input_ids`; 0 without `input_ids`."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    return ids.numel() if isinstance(ids, torch.Tensor) else 0


def equal_part(batch: Any, count: int) -> int:
    """Return the number of samples of each micro-batch when a batch is divided into `count` equal parts.

    Raises:
        DataError: if the number of samples is not a multiple of `count`.
    """
    samples = num_samples(batch)
    if samples % count:
        raise DataError(
            f"a batch of {samples} samples cannot be divided into {count} equal micro-batches",
            where="data loader",
            remedy="let the loader leave out an incomplete batch (drop_last), or leave micro_batch_size out",
        )
    return samples // count
