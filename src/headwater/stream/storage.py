"""Builds the weight store, and the object that brings weights to the device, as a plan says."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from headwater.core.stage import StageSpec
from headwater.fabric.fabric import ALONE, Fabric
from headwater.plan.types import Plan
from headwater.store.build import GradientOptions, build_store
from headwater.store.device import DeviceMemory, DeviceTier, arriving_bytes
from headwater.store.disk import DiskTier, file_sizes
from headwater.store.files import sums_bytes
from headwater.store.in_backward import BackwardUpdates, Moments
from headwater.store.memory import MemoryTier
from headwater.store.mixed import MixedTier
from headwater.store.ownership import Ownership
from headwater.store.rules import UpdateRules
from headwater.store.store import WeightStore
from headwater.store.tier import ElsewhereTier, Tier
from headwater.stream.borrowed import BorrowedWeights
from headwater.stream.device import Device
from headwater.stream.options import EngineOptions
from headwater.stream.weights import InPlaceWeights, MixedWeights, SlabWeights, Weights, WeightsInSlabs


@dataclasses.dataclass(frozen=True)
class StoreSettings:
    """All that a weight store depends on in its plan. Plans with equal settings can use the same store.

    Attributes:
        stages: the stages.
        on_device: indices of the stages in device memory.
        in_host_memory: indices of those in host memory.
        on_disk: indices of those on disk.
        folder: folder of the files; `None` if nothing is on disk.
        gradients_on_disk: true if gradients wait for the update on disk.
        sum_dtype: dtype in which gradients are summed; `None` for their own.
        shares_slabs: true if the ranks of a host share slabs.
        moments: of updates in backward; `None` if stages are updated when they are fetched.
    """

    stages: tuple[StageSpec, ...]
    on_device: tuple[int, ...]
    in_host_memory: tuple[int, ...]
    on_disk: tuple[int, ...]
    folder: Path | None
    gradients_on_disk: bool
    sum_dtype: torch.dtype | None
    shares_slabs: bool
    moments: Moments | None

    @classmethod
    def of(cls, plan: Plan) -> StoreSettings:
        """Return the settings of a plan's store."""
        gradients_on_disk = plan.gradient_tier == "disk"
        return cls(
            stages=plan.trace.stages,
            on_device=plan.on_device,
            in_host_memory=plan.in_host_memory,
            on_disk=plan.on_disk,
            folder=plan.folder if plan.on_disk or gradients_on_disk else None,
            gradients_on_disk=gradients_on_disk,
            sum_dtype=torch.float32 if plan.precision.mixed and not plan.holds_exact_gradients else None,
            shares_slabs=plan.shares_slabs,
            moments=_moments(plan) if plan.updates == "in_backward" else None,
        )


def make_store(
    settings: StoreSettings,
    rule: UpdateRules,
    device: Device,
    order: list[tuple[int, int]],
    fabric: Fabric,
    options: EngineOptions,
) -> WeightStore:
    """Build the weight store of this rank, with the tier and gradients that the plan has chosen.

    Args:
        settings: those of the plan.
        rule: the update rules.
        device: the device of this rank.
        order: (stage, param) of every parameter in the model's order.
        fabric: the ranks that train together.
        options: `user_loop` and `verify_disk` count here.
    """
    sum_dtype = settings.sum_dtype
    ranks = fabric.neighbours if options.user_loop else fabric

    def make_tier(ownership: Ownership) -> Tier:
        def in_memory(stages: Sequence[int]) -> Tier:
            layouts = [ownership.layouts[stage] for stage in stages]
            return MemoryTier(layouts, fabric=ranks, page_lock=device.page_lock)

        def on_disk(stages: Sequence[int]) -> Tier:
            return _disk_tier(stages, ownership, settings, ranks, options)

        def on_device(stages: Sequence[int]) -> Tier:
            memory = DeviceMemory(device.allocate_slab, device.compute, device.new_stream)
            layouts = [ownership.layouts[stage] for stage in stages]
            arriving = max(arriving_bytes(layout, sum_dtype) for layout in layouts) if ranks.size > 1 else 0
            return DeviceTier(layouts, memory, arrivals_bytes=arriving)

        # The device first: it has the least room.
        tiers = [
            (settings.on_device, on_device),
            (settings.in_host_memory, in_memory),
            (settings.on_disk, on_disk),
        ]
        used = [(stages, make) for stages, make in tiers if stages]
        return used[0][1](used[0][0]) if len(used) == 1 else MixedTier(ownership.layouts, used)

    folder = settings.folder if settings.gradients_on_disk else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    store = build_store(
        settings.stages,
        rule,
        make_tier,
        on_disk=settings.on_disk,
        on_device=settings.on_device,
        gradients=GradientOptions(
            sum_dtype,
            folder,
            options.verify_disk,
            # Each rank copies the sums of stages in device memory to its device.
            page_lock=device.page_lock if settings.on_device else None,
            user_loop=options.user_loop,
        ),
        order=order,
        fabric=fabric,
    )
    if settings.moments is not None:
        store.in_backward = BackwardUpdates(
            store.stages, settings.moments, store.access, store.ledger, store.gradients
        )
    return store


def _moments(plan: Plan) -> Moments:
    # A CPU reads weights in memory and updates them with the same cores; only the disk is used beside it.
    on_cpu = plan.device == "cpu"
    return Moments(
        plan.trace.uses,
        computing=frozenset(plan.in_host_memory if on_cpu else ()),
        left_out=frozenset(plan.on_device),
        one_core=on_cpu,
    )


def make_weights(plan: Plan, store: WeightStore, device: Device, fabric: Fabric) -> Weights:
    """Build the object that brings weights to the device of this rank.

    Args:
        plan: the plan.
        store: the weight store of this rank.
        device: the device of this rank.
        fabric: the ranks that train together; those of one host may share slabs.
    """
    in_place, stages = plan.read_in_place, plan.trace.stages
    if len(in_place) == len(stages) or not (fabric.computes or plan.shares_slabs):
        return InPlaceWeights(store, device)
    # A rank that shares no slabs fills its own, as if it were alone.
    sharing = fabric if plan.shares_slabs else ALONE
    slabs: WeightsInSlabs
    if sharing.local_rank != 0 or not sharing.computes:
        slabs = BorrowedWeights(store, stages, plan.slabs, sharing, in_place)
    else:
        slabs = SlabWeights(store, stages, plan.slabs, device, sharing, in_place)
    return MixedWeights(in_place, InPlaceWeights(store, device), slabs) if in_place else slabs


def _disk_tier(
    stages: Sequence[int],
    ownership: Ownership,
    settings: StoreSettings,
    fabric: Fabric,
    options: EngineOptions,
) -> Tier:
    """Build the disk tier of some stages. The host's first rank creates the files, and other ranks open them.

    A rank uses the files if it updates stages or reads weights. In the user's loop every rank may read
    weights at any time, so updates are then written to the files at once.
    """
    folder, layouts = settings.folder, [ownership.layouts[stage] for stage in stages]
    assert folder is not None, "settings with stages on disk name a folder"
    kept = [ownership.host_groups(stage) for stage in stages]
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
    reads = options.user_loop or (fabric.computes and not settings.shares_slabs)
    if reads or any(ownership.updates(stage) for stage in stages):
        return make(origins=every[fabric.rank - fabric.local_rank])
    return ElsewhereTier(layouts)
