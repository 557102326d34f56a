"""What a batch must be: tensors, nested in any way, that hold the same number of samples."""

from __future__ import annotations

from typing import Any

import torch

from headwater.core.errors import DataError
from headwater.core.trees import map_leaves, map_tensors

_SHOWN = 4


def check_batch(batch: Any, *, where: str, ragged: bool = False) -> None:
    """Refuse what is not a batch.

    Args:
        batch: what the loader gave. `None` may stand for an optional tensor.
        where: which batch it is, for the error.
        ragged: whether tensors may differ in their first dimension; scalars always may.

    Raises:
        DataError: if it holds no tensors, something else, or tensors with different numbers of samples.
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
                f"{path} is a {type(leaf).__name__}, and a batch holds tensors",
                where=where,
                remedy="turn it into a tensor, or drop it, in the collate function of the loader",
            )

    map_leaves(look, batch, "batch")
    if not tensors:
        raise DataError(
            "the batch holds no tensor", where=where, remedy="look at the loader's collate function"
        )
    if not ragged and len(set(sizes.values())) > 1:
        raise DataError(
            f"the tensors of a batch differ in their first dimension: {_summary(sizes)}",
            where=where,
            remedy="pad them, or drop samples, in the collate function of the loader; "
            "if the model takes such batches, write DataExecutor(…, ragged=True)",
        )


def _summary(sizes: dict[str, int]) -> str:
    """One path for each size, the first that has it."""
    first: dict[int, str] = {}
    for path, size in sizes.items():
        first.setdefault(size, path)
    shown = [f"{path} has {size}" for size, path in list(first.items())[:_SHOWN]]
    return ", ".join([*shown, "…"] if len(first) > _SHOWN else shown)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`; those in pinned memory travel while the program goes on."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
