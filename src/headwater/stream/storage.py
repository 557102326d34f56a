"""Builds the weight store, and the object that brings weights to the device, as a plan says."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from headwater.fabric.fabric import ALONE, Fabric
from headwater.plan.types import Plan
from headwater.store.build import GradientOptions, build_store
from headwater.store.disk import DiskTier, file_sizes
from headwater.store.files import sums_bytes
from headwater.store.layout import StageLayout
from headwater.store.memory import MemoryTier
from headwater.store.mixed import MixedTier
from headwater.store.ownership import Ownership
from headwater.store.rules import UpdateRules
from headwater.store.store import WeightStore
from headwater.store.tier import ElsewhereTier, Tier
from headwater.stream.borrowed import BorrowedWeights
from headwater.stream.device import Device
from headwater.stream.options import EngineOptions
from headwater.stream.weights import InPlaceWeights, MixedWeights, SlabWeights, Weights


def make_store(
    plan: Plan,
    rule: UpdateRules,
    device: Device,
    order: list[tuple[int, int]],
    fabric: Fabric,
    options: EngineOptions,
) -> WeightStore:
    """Build the weight store of this rank, with the tier and gradients that the plan has chosen.

    Args:
        plan: the plan.
        rule: the update rules.
        device: the device of this rank.
        order: (stage, param) of every parameter in the model's order.
        fabric: the ranks that train together.
        options: `user_loop` and `verify_disk` count here.
    """
    # A sum of one gradient is exact in its own dtype; unscaling of fp16 needs the range of fp32.
    one_exact_sum = plan.num_micro_batches == 1 and plan.precision.name != "fp16"
    sum_dtype = torch.float32 if plan.precision.mixed and not one_exact_sum else None
    ranks = fabric.neighbours if options.user_loop else fabric

    def make_tier(ownership: Ownership) -> Tier:
        def in_memory(layouts: Sequence[StageLayout]) -> Tier:
            return MemoryTier(layouts, fabric=ranks, page_lock=device.page_lock)

        if plan.tier == "memory":
            return in_memory(ownership.layouts)
        if not plan.in_memory:
            return _disk_tier(ownership, plan, ranks, options)
        assert ranks.size == 1, "several ranks keep all stages in memory, or all on disk"
        on_disk = functools.partial(DiskTier, folder=plan.folder, verify=options.verify_disk)
        return MixedTier(ownership.layouts, plan.in_memory, in_memory, on_disk)

    folder = plan.folder if plan.gradient_tier == "disk" else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return build_store(
        plan.trace.stages,
        rule,
        make_tier,
        on_disk=plan.tier != "memory",
        gradients=GradientOptions(sum_dtype, folder, options.verify_disk, user_loop=options.user_loop),
        order=order,
        fabric=fabric,
    )


def make_weights(plan: Plan, store: WeightStore, device: Device, fabric: Fabric) -> Weights:
    """Build the object that brings weights to the device of this rank.

    Args:
        plan: the plan.
        store: the weight store of this rank.
        device: the device of this rank.
        fabric: the ranks that train together; those of one host may share slabs.
    """
    if plan.in_place or not (fabric.computes or plan.shares_slabs):
        return InPlaceWeights(store)
    # A rank that shares no slabs fills its own, as if it were alone.
    sharing = fabric if plan.shares_slabs else ALONE
    in_place = plan.read_in_place
    if in_place:
        slabs = SlabWeights(store, plan.trace.stages, plan.slabs, device, sharing, in_place)
        return MixedWeights(in_place, InPlaceWeights(store), slabs)
    if sharing.local_rank != 0 or not sharing.computes:
        return BorrowedWeights(store, plan.trace.stages, plan.slabs, sharing)
    return SlabWeights(store, plan.trace.stages, plan.slabs, device, sharing)


def _disk_tier(ownership: Ownership, plan: Plan, fabric: Fabric, options: EngineOptions) -> Tier:
    """Build the disk tier. The host's first rank creates the files, and other ranks that use them open them.

    A rank uses the files if it updates stages or reads weights. In the user's loop every rank may read
    weights at any time, so updates are then written to the files at once.
    """
    folder, layouts = plan.folder, ownership.layouts
    kept = [ownership.host_groups(stage) for stage in range(len(layouts))]
    sizes = file_sizes(layouts, folder, kept).values()
    sums = [fabric.allocate(sums_bytes(size)) for size in sizes] if options.verify_disk else None
    make = functools.partial(
        DiskTier,
        layouts,
        folder,
        verify=options.verify_disk,
        kept=kept,
        sums=sums,
        write_behind=not options.user_loop or fabric.local_size == 1,
    )
    # The other ranks open the leader's files by the descriptors that it sends below.
    tier = make() if fabric.local_rank == 0 else None
    every = fabric.gather_objects([] if tier is None else tier.origins, list[Path])
    if tier is not None:
        return tier
    reads = options.user_loop or (fabric.computes and not plan.shares_slabs)
    if reads or any(ownership.updates(stage) for stage in range(len(layouts))):
        return make(origins=every[fabric.rank - fabric.local_rank])
    return ElsewhereTier(layouts)
