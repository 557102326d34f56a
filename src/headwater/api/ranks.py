"""Functions for a user's loop on several ranks: divide batches, combine values, choose accelerators."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from headwater.config.sections import ClusterConfig
from headwater.core.batches import num_samples, slice_batch
from headwater.core.errors import ConfigError, DataError, StreamError
from headwater.core.lazy import StoredTensor
from headwater.core.placement import check_csx_limit
from headwater.core.process_value import ProcessValue
from headwater.core.units import counted
from headwater.fabric.fabric import Fabric
from headwater.fabric.membership import current
from headwater.stream.at_rest import AtRest

Batch = TypeVar("Batch")

_WHOLE = "a value of the whole batch"
"""What `whole` waits for."""

_part_samples = ProcessValue[int | None](None)
"""Number of samples in this rank's part of the last divided batch; `None`: no batch was divided yet.

Shared by the process: a data loader divides batches, and the step that uses them does not see the loader.
"""


def take_part(batch: Batch, *, equal: bool = True) -> Batch:
    """Return this rank's part of a batch that all ranks have. The parts are consecutive, of equal size.

    A tensor whose first dimension is not the number of samples is whole in each part.

    Args:
        batch: tensors in any nesting.
        equal: true if the parts must have equal sizes; otherwise the sizes may differ by one.

    Returns:
        The part, with the same nesting.

    Raises:
        DataError: if `equal` is true and the number of samples is not a multiple of the number of ranks.
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
    """Record that `batch` is this rank's part of a batch."""
    _part_samples.value = num_samples(batch)


def is_divided() -> bool:
    """Return true if a batch was divided among the ranks."""
    return _part_samples.value is not None


def whole(value: torch.Tensor) -> torch.Tensor:
    """Combine the values of all ranks' parts to the value of the whole batch. All ranks must call this.

    A floating-point scalar is averaged over ranks. An integer scalar is a count, and is summed. A tensor
    whose first dimension is the number of samples of the part is concatenated. Any other floating-point or
    complex tensor is averaged. Tensors in the weight store are the same on all ranks and are returned as they
    are.

    Args:
        value: the value of this rank's part.

    Raises:
        StreamError: if another tensor (integers or booleans) differs between ranks.
    """
    fabric = current()
    if fabric.size == 1 or isinstance(value, AtRest | StoredTensor):
        return value
    value = value.detach()
    if value.dim() == 0 and value.is_floating_point():
        # The ranks exchange a number, because objects are slower.
        return value.new_tensor(sum(fabric.gather(value.item(), _WHOLE)) / fabric.size)
    every = fabric.gather_objects(value.cpu(), torch.Tensor, _WHOLE)
    if value.dim() and len(value) == _part_samples.value:
        return torch.cat(every).to(value.device)
    if value.is_floating_point() or value.is_complex():
        return torch.stack(every).mean(0).to(value.device)
    if value.dim() == 0 and value.dtype != torch.bool:
        return torch.stack(every).sum(0, dtype=value.dtype).to(value.device)
    if any(not torch.equal(each, every[0]) for each in every):
        raise StreamError(
            f"expected the same tensor on all ranks, got tensors with different values (shape "
            f"{list(value.shape)}, {value.dtype}), which cannot be combined into one for the whole batch",
            remedy="pass a floating-point tensor (ranks are averaged), one integer (ranks are summed), or "
            "a tensor with one entry for each sample (ranks are concatenated)",
        )
    return value


def refuse_restarts(cluster: ClusterConfig, *, where: str) -> None:
    """Raise if the options ask for automatic restarts, because a user's script cannot be restarted.

    Args:
        cluster: the options.
        where: the place where the user wrote `max_restarts`; for errors.

    Raises:
        ConfigError: if `max_restarts` is not 0.
    """
    if cluster.max_restarts:
        raise ConfigError(
            f"expected max_restarts=0 in a script, got {cluster.max_restarts}: "
            "only `headwater fit` restarts a run",
            where=where,
            remedy="leave max_restarts out, and start the script again",
        )


def take_accelerator(device: str, fabric: Fabric, *, where: str) -> None:
    """Choose a separate accelerator for this rank. All ranks call this before they use an accelerator.

    Args:
        device: the type of device on which the ranks compute, `cpu` or `cuda`.
        fabric: the ranks.
        where: the place where the user wrote the number of ranks; for errors.

    Raises:
        ConfigError: if there are fewer accelerators than ranks that compute.
    """
    if device == "cpu" or fabric.size == 1:
        return
    own = _cuda_device(fabric.local_rank) if fabric.computes else None
    # Not the index: if each rank sees only one device, it is device 0 on every rank.
    uuid = None if own is None else str(torch.cuda.get_device_properties(own).uuid)
    every = fabric.gather_objects(uuid, str | None)
    there = len(set(every) - {None})
    check_csx_limit(fabric.num_csx, there, "accelerators", where=where, remedy="the backend type CPU")
    if own is not None:
        torch.cuda.set_device(own)


def _cuda_device(local_rank: int) -> torch.device:
    """Return the CUDA device of a rank: devices are assigned in turn if the rank sees several of them."""
    return torch.device("cuda", local_rank % torch.cuda.device_count())
