"""Gradients from backward to the update: summed over micro-batches, ranks and hosts, measured and edited.

`port` says what a store and a user's loop may do; `make_gradients` chooses the implementation:

| ranks | `train_step` | a user's loop |
|---|---|---|
| one | `LocalGradients` | `LocalGradients` |
| several on one host | `RankGradients` | `LoopGradients` |
| several hosts | `HostGradients`, around `RankGradients` | `LoopGradients`, with a `HostAssembly` |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from headwater.core.stage import StageSpec
from headwater.fabric.fabric import Fabric
from headwater.store.gradients.buffer import DiskBuffer, GradientBuffer, MemoryBuffer
from headwater.store.gradients.hosts import HostGradients
from headwater.store.gradients.local import LocalGradients
from headwater.store.gradients.loop import LoopGradients
from headwater.store.gradients.port import GradientSink
from headwater.store.gradients.ranks import RankGradients
from headwater.store.gradients.sizes import SumSizes
from headwater.store.gradients.stage_exchange import HostRun, StageExchange
from headwater.store.gradients.storage import DiskStorage, GradientStorage, MemoryStorage


@dataclasses.dataclass(frozen=True)
class GradientOptions:
    """Options that decide how gradients are summed, and where the sums are kept.

    Attributes:
        sum_dtype: dtype in which gradients narrower than fp32 are summed over micro-batches; `None` for their
            own dtype.
        folder: where gradients wait on disk; `None` if they wait in memory.
        verify: compare all that is read from disk with checksums of what was written.
        user_loop: true if a user's loop reads gradients, changes them and keeps them over steps.
    """

    sum_dtype: torch.dtype | None = None
    folder: Path | None = None
    verify: bool = False
    user_loop: bool = False


def make_gradients(
    stages: Sequence[StageSpec], fabric: Fabric, host_run: HostRun, options: GradientOptions
) -> GradientSink:
    """Return the object that sums and holds gradients on this rank.

    Args:
        stages: the stages.
        fabric: the ranks of all hosts.
        host_run: says which host updates which elements.
        options: the ways in which gradients are summed.
    """
    if fabric.size == 1:
        return LocalGradients(stages, _buffer(stages, options), options.sum_dtype)
    # A user's loop sums on each host, and hosts are put together when a sum is read.
    storage = _storage(stages, fabric.neighbours if options.user_loop else fabric, options)
    if options.user_loop:
        return LoopGradients(stages, fabric, storage)
    ranks = RankGradients(stages, fabric, storage)
    if fabric.num_hosts == 1:
        return ranks
    return HostGradients(ranks, fabric, StageExchange(stages, fabric, ranks.sums, host_run))


def _buffer(stages: Sequence[StageSpec], options: GradientOptions) -> GradientBuffer:
    if options.folder is None:
        return MemoryBuffer()
    return DiskBuffer(stages, options.folder, lambda wire: options.sum_dtype or wire, verify=options.verify)


def _storage(stages: Sequence[StageSpec], fabric: Fabric, options: GradientOptions) -> GradientStorage:
    sizes = SumSizes(stages, options.sum_dtype)
    if options.folder is None:
        return MemoryStorage(sizes, fabric)
    return DiskStorage(stages, sizes, fabric, options.folder, verify=options.verify)
