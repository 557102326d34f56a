"""What several ranks mean for a loop: parts of batches, values of the whole, and what is refused."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from headwater.config.sections import ClusterConfig
from headwater.core.batches import num_samples, slice_batch
from headwater.core.errors import ConfigError, DataError, StreamError
from headwater.core.lazy import LazyTensor
from headwater.core.units import counted
from headwater.fabric.fabric import Fabric
from headwater.fabric.membership import current
from headwater.stream.at_rest import AtRest

Batch = TypeVar("Batch")

_part_samples: int | None = None  # of the batch that was divided last


def take_part(batch: Batch, *, equal: bool = True) -> Batch:
    """This rank's part of a batch that all ranks have: samples in order, equally many for each.

    Tensors that have another first dimension than the samples are in each part whole.

    Args:
        batch: tensors in any nesting.
        equal: whether parts must be equal; otherwise their sizes may differ by one.

    Raises:
        DataError: if the batch cannot be divided so.
    """
    fabric = current()
    if fabric.size == 1:
        return batch
    samples = num_samples(batch)
    if equal and samples % fabric.size:
        below = samples - samples % fabric.size
        near = f"{below} or {below + fabric.size}" if below else str(fabric.size)
        raise DataError(
            f"a batch of {counted(samples, 'sample', 'samples')} cannot be divided among {fabric.size} ranks",
            where="data loader",
            remedy=f"write a batch size of {near}, and leave out a last batch that is not full (drop_last)",
        )
    first, last = (samples * rank // fabric.size for rank in (fabric.rank, fabric.rank + 1))
    part: Batch = slice_batch(batch, first, last)
    note_part(part)
    return part


def note_part(batch: Any) -> None:
    """Say that this is this rank's part of a batch."""
    global _part_samples
    _part_samples = num_samples(batch)


def is_divided() -> bool:
    """Whether ranks have been given parts of batches."""
    return _part_samples is not None


def whole(value: torch.Tensor) -> torch.Tensor:
    """What a value of this rank's part of a batch is for the whole batch. All ranks ask alike.

    A floating-point number is the mean over ranks, and so is a tensor of such; a whole number is a count, and
    the sum. A tensor whose first dimension is that of the part is put together. What lies in the weight store
    is the same for all.

    Raises:
        StreamError: for anything else that is not the same on all ranks.
    """
    fabric = current()
    if fabric.size == 1 or isinstance(value, AtRest | LazyTensor):
        return value
    value = value.detach()
    if value.dim() == 0 and value.is_floating_point():
        return value.new_tensor(sum(fabric.gather(value.item())) / fabric.size)
    every = fabric.gather_objects(value.cpu(), torch.Tensor)
    if value.dim() and len(value) == _part_samples:
        return torch.cat(every).to(value.device)
    if value.is_floating_point() or value.is_complex():
        return torch.stack(every).mean(0).to(value.device)
    if value.dim() == 0 and value.dtype != torch.bool:
        return torch.stack(every).sum(0, dtype=value.dtype).to(value.device)
    if any(not torch.equal(each, every[0]) for each in every):
        raise StreamError(
            f"ranks have different tensors of shape {list(value.shape)} and {value.dtype}, and nobody knows "
            "what they are for the whole batch",
            remedy="give a closure a mean (floating point), a count (a whole number), or one entry a sample",
        )
    return value


def refuse_restarts(cluster: ClusterConfig, *, where: str) -> None:
    """Raise `ConfigError` if a script of the user's own is to be started again by itself."""
    if cluster.max_restarts:
        raise ConfigError(
            "only `headwater fit` starts a run again by itself",
            where=where,
            remedy="leave it out, and start the script again",
        )


def take_accelerator(device: str, fabric: Fabric, *, where: str) -> None:
    """Let this rank compute on an accelerator of its own. All ranks ask, before they place anything on one.

    Args:
        device: on which they compute, `cpu` or `cuda`.
        fabric: the ranks.
        where: their number was written; for errors.

    Raises:
        ConfigError: if there is not one for each rank that computes.
    """
    if device == "cpu" or fabric.size == 1:
        return
    own = _cuda_device(fabric.local_rank) if fabric.computes else None
    uuid = None if own is None else str(torch.cuda.get_device_properties(own).uuid)
    every = fabric.gather_objects(uuid, str | None)
    there = len(set(every) - {None})
    if there < fabric.num_csx:
        raise ConfigError(
            f"{fabric.num_csx} CSXs are asked for, and there are {there} accelerators",
            where=where,
            remedy=f"write at most {there}, or the backend type CPU",
        )
    if own is not None:
        torch.cuda.set_device(own)


def _cuda_device(local_rank: int) -> torch.device:
    """The CUDA device of a rank: one after the other where it sees several, else the one that it sees."""
    return torch.device("cuda", local_rank % torch.cuda.device_count())
