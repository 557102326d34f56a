"""Construction of a weight store from its tier, gradients and ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from headwater.core.cleanup import on_failure
from headwater.core.stage import ParamKey, StageSpec
from headwater.fabric.fabric import ALONE, Fabric
from headwater.store.gradients.buffer import DiskBuffer, GradientBuffer, MemoryBuffer, SplitBuffer
from headwater.store.gradients.hosts import HostGradients
from headwater.store.gradients.lasting import LastingSums
from headwater.store.gradients.local import LocalGradients
from headwater.store.gradients.loop import LoopGradients
from headwater.store.gradients.port import GradientSink
from headwater.store.gradients.ranks import RankGradients
from headwater.store.gradients.sizes import SumSizes
from headwater.store.gradients.stage_exchange import HostRun, StageExchange
from headwater.store.gradients.storage import (
    DiskStorage,
    GradientStorage,
    MemoryStorage,
    PageLock,
    PooledStorage,
)
from headwater.store.layout import DEVICE_PIECE_ELEMENTS, PIECE_ELEMENTS
from headwater.store.ownership import Ownership
from headwater.store.rule import stage_layout
from headwater.store.rules import UpdateRules
from headwater.store.store import WeightStore
from headwater.store.tier import Tier


@dataclasses.dataclass(frozen=True)
class GradientOptions:
    """Options that decide how gradients are summed, and where the sums are kept.

    Attributes:
        sum_dtype: see `ParamSpec.sum_dtype`.
        folder: where gradients wait on disk; `None` if they wait in memory.
        verify: compare all that is read from disk with checksums of what was written.
        page_lock: locks the pages of sums in host memory, so that a device copies them faster; `None` if no
            device copies them.
        user_loop: true if the user's loop trains. It may read and change gradients, and keep them over steps.
        pooled: true if updates during the backward free the sums of several ranks.
    """

    sum_dtype: torch.dtype | None = None
    folder: Path | None = None
    verify: bool = False
    page_lock: PageLock | None = None
    user_loop: bool = False
    pooled: bool = False


def build_store(
    stages: Sequence[StageSpec],
    rule: UpdateRules,
    make_tier: Callable[[Ownership], Tier],
    *,
    on_disk: Collection[int] = (),
    on_device: Collection[int] = (),
    gradients: GradientOptions | None = None,
    order: Sequence[ParamKey] | None = None,
    fabric: Fabric = ALONE,
) -> WeightStore:
    """Return the weight store that this rank uses.

    Args:
        stages: the stages.
        rule: how parameters are updated.
        make_tier: returns the tier of the layouts in an `Ownership`.
        on_disk: indices of the stages that the tier keeps in files.
        on_device: indices of the stages that the tier keeps in device memory. Their gradients stay there too,
            if there is one rank.
        gradients: how gradients are summed.
        order: every parameter in the model's order, in which norms are combined.
        fabric: the ranks that train together.
    """
    gradients = gradients or GradientOptions()
    # A user's loop reads and changes weights at any time, so each host has all of them.
    ranks = fabric.neighbours if gradients.user_loop else fabric
    layouts = [
        stage_layout(
            stage,
            rule,
            piece_elements=DEVICE_PIECE_ELEMENTS if stage.index in on_device else PIECE_ELEMENTS,
        )
        for stage in stages
    ]
    ownership = Ownership(
        layouts,
        ranks.rank,
        ranks.placement,
        ranks.hosts,
        on_disk=on_disk,
        replicated=on_device if ranks.size > 1 else (),
    )
    tier = make_tier(ownership)
    with on_failure(tier.close):  # there may be no room for the gradients: give the tier's room back
        sink = make_gradients(stages, fabric, ownership.host_run, gradients, on_device)
        with on_failure(sink.close):
            return WeightStore(rule, tier, ownership, sink, order=order, fabric=ranks)


def make_gradients(
    stages: Sequence[StageSpec],
    fabric: Fabric,
    host_run: HostRun,
    options: GradientOptions,
    on_device: Collection[int] = (),
) -> GradientSink:
    """Return the object that sums and holds gradients on this rank.

    Args:
        stages: the stages.
        fabric: the ranks of all hosts.
        host_run: returns the elements that a host updates.
        options: the ways in which gradients are summed.
        on_device: indices of the stages in device memory. With one rank their gradients stay there.
    """
    if fabric.size == 1:
        return LocalGradients(stages, _buffer(stages, options, on_device), options.sum_dtype)
    assert not (on_device and options.user_loop), "a user's change would reach one rank's replica only"
    # In a user's loop each host has its own sums. They are added up when a sum is read.
    storage = _storage(stages, fabric.neighbours if options.user_loop else fabric, options)
    with on_failure(storage.close):  # memory that is freed while it is locked cannot be locked again
        if options.user_loop:
            return LoopGradients(stages, fabric.neighbours, LastingSums(stages, fabric, storage))
        ranks = RankGradients(stages, fabric, storage)
        if fabric.num_hosts == 1:
            return ranks
        return HostGradients(ranks, fabric, StageExchange(stages, fabric, ranks.sums, host_run))


def _buffer(
    stages: Sequence[StageSpec], options: GradientOptions, on_device: Collection[int]
) -> GradientBuffer:
    if options.folder is None:
        return MemoryBuffer()
    in_files = [stage for stage in stages if stage.index not in on_device]
    on_disk = DiskBuffer(in_files, options.folder, options.sum_dtype, verify=options.verify)
    return SplitBuffer(frozenset(on_device), on_disk) if on_device else on_disk


def _storage(stages: Sequence[StageSpec], fabric: Fabric, options: GradientOptions) -> GradientStorage:
    sizes = SumSizes(stages, options.sum_dtype)
    if options.folder is None and options.pooled and options.page_lock is None:
        return PooledStorage(stages, sizes, fabric)
    if options.folder is None:
        return MemoryStorage(sizes, fabric, options.page_lock)
    return DiskStorage(stages, sizes, fabric, options.folder, verify=options.verify)
