"""Builds the weight store, and the object that brings weights to the device, as a plan says."""

from __future__ import annotations

from functools import partial

from headwater.core.file_memory import put_copy_in_file
from headwater.core.files import disk_errors
from headwater.fabric.fabric import ALONE, Fabric
from headwater.plan.types import Plan
from headwater.store.build import GradientOptions, build_store
from headwater.store.gradients.ranks import RankGradients
from headwater.store.in_backward import BackwardSchedule, BackwardUpdates, LocalBackwardUpdates
from headwater.store.rank_backward import RankBackwardUpdates
from headwater.store.rules import UpdateRules
from headwater.store.store import WeightStore
from headwater.stream.borrowed import BorrowedWeights
from headwater.stream.device import Device
from headwater.stream.options import EngineOptions
from headwater.stream.store_settings import StoreSettings
from headwater.stream.tiers import TierBuilder
from headwater.stream.weights import InPlaceWeights, MixedWeights, SlabWeights, Weights, WeightsInSlabs


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
        settings: the settings of the store in the plan.
        rule: the update rules.
        device: the device of this rank.
        order: (stage, param) of every parameter in the model's order.
        fabric: the ranks that train together.
        options: the options of the engine.
    """
    folder = settings.folder if settings.gradients_on_disk else None
    if folder is not None:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
    # In a user's loop each host updates all stages; see `build_store`.
    ranks = fabric.neighbours if settings.user_loop else fabric
    tiers = TierBuilder(settings, device, ranks, verify=options.verify_disk)
    store = build_store(
        settings.stages,
        rule,
        tiers.build,
        on_disk=settings.on_disk,
        on_device=settings.on_device,
        gradients=GradientOptions(
            settings.sum_dtype,
            folder,
            options.verify_disk,
            # Each rank copies the sums of stages in device memory to its device.
            page_lock=device.page_lock if settings.on_device else None,
            user_loop=settings.user_loop,
            pooled=settings.backward_schedule is not None,
        ),
        order=order,
        fabric=fabric,
    )
    store.parameters.masks.first = options.first_mask
    store.parameters.put_copy_in_file = partial(put_copy_in_file, options.folder_of_copies)
    if settings.backward_schedule is not None:
        store.in_backward = _backward_updates(store, settings.backward_schedule)
    return store


def _backward_updates(store: WeightStore, schedule: BackwardSchedule) -> BackwardUpdates:
    gradients = store.gradients
    common = store.stages, schedule, store.access, store.ledger
    if store.fabric.size == 1:
        return LocalBackwardUpdates(*common, gradients)
    assert isinstance(gradients, RankGradients), "the engine refuses other ranks"
    return RankBackwardUpdates(*common, gradients, fabric=store.fabric, updates=store.ownership.updates)


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
