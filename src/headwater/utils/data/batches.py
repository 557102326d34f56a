"""Checks of batches, and their transfer to a device. A batch is tensors in any nesting."""

from __future__ import annotations

from typing import Any

import torch

from headwater.core.errors import DataError
from headwater.core.trees import map_leaves, map_tensors

_SHOWN = 4


def check_batch(batch: Any, *, where: str, ragged: bool = False) -> None:
    """Raise if the output of a loader is not a batch: tensors with the same first dimension.

    Args:
        batch: the object from the loader. A leaf may be `None` (an optional tensor).
        where: place for the error, such as `batch of step 3`.
        ragged: true if the first dimensions of the tensors may differ. Scalars are always allowed.

    Raises:
        DataError: if the batch has no tensors, a leaf of another type, or different numbers of samples.
    """
    sizes: dict[str, int] = {}
    tensors = 0

    def look(path: str, leaf: Any) -> None:
        nonlocal tensors
        if isinstance(leaf, torch.Tensor):
            tensors += 1
            if leaf.dim():
                sizes[path] = leaf.shape[0]
        elif leaf is not None:
            raise DataError(
                f"expected {path} to be a tensor, got {type(leaf).__name__}",
                where=where,
                remedy="convert it to a tensor, or drop it, in the collate function of the loader",
            )

    map_leaves(look, batch, "batch")
    if not tensors:
        raise DataError(
            "the batch contains no tensors", where=where, remedy="check the loader's collate function"
        )
    if not ragged and len(set(sizes.values())) > 1:
        raise DataError(
            f"the tensors of a batch differ in their first dimension: {_summary(sizes)}",
            where=where,
            remedy="pad the tensors in the collate function of the loader; "
            "if the model accepts such batches, write DataExecutor(…, ragged=True)",
        )


def _summary(sizes: dict[str, int]) -> str:
    """Return text that names one tensor for each first dimension."""
    first: dict[int, str] = {}
    for path, size in sizes.items():
        first.setdefault(size, path)
    shown = [f"{path} has {size}" for size, path in list(first.items())[:_SHOWN]]
    return ", ".join([*shown, "…"] if len(first) > _SHOWN else shown)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on `device`. Copies from pinned memory are asynchronous."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
