"""Builds the tier of a weight store: stages in device memory, in host memory and on disk."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import final

from headwater.fabric.fabric import Fabric
from headwater.store.device import DeviceMemory, DeviceTier, arriving_bytes
from headwater.store.disk import DiskTier, file_sizes
from headwater.store.files import checksum_bytes
from headwater.store.layout import StageLayout
from headwater.store.memory import MemoryTier
from headwater.store.mixed import MixedTier
from headwater.store.ownership import Ownership
from headwater.store.tier import ElsewhereTier, Tier
from headwater.stream.device import Device
from headwater.stream.store_settings import StoreSettings


@final
@dataclasses.dataclass(frozen=True)
class TierBuilder:
    """Builds the tier of this rank. The settings say where each stage is.

    Attributes:
        settings: the settings of the store in the plan.
        device: the device of this rank.
        ranks: the ranks among which the updates of the stages are divided.
        verify: compare data that is read from disk with its checksums.
    """

    settings: StoreSettings
    device: Device
    ranks: Fabric
    verify: bool

    def build(self, ownership: Ownership) -> Tier:
        """Allocate memory and create files for all stages, and return their tier.

        Args:
            ownership: the layouts of the stages, and which rank updates which pieces.
        """
        # The device first: it has the least room.
        tiers = [
            (self.settings.on_device, self._on_device),
            (self.settings.in_host_memory, self._in_host_memory),
            (self.settings.on_disk, self._on_disk),
        ]
        used = [(stages, functools.partial(make, ownership)) for stages, make in tiers if stages]
        return used[0][1](used[0][0]) if len(used) == 1 else MixedTier(ownership.layouts, used)

    def _on_device(self, ownership: Ownership, stages: Sequence[int]) -> Tier:
        memory = DeviceMemory(self.device.allocate_slab, self.device.compute, self.device.new_stream)
        layouts, arriving = _layouts(ownership, stages), 0
        if self.ranks.size > 1:
            arriving = max(arriving_bytes(layout, self.settings.sum_dtype) for layout in layouts)
        return DeviceTier(layouts, memory, arrivals_bytes=arriving)

    def _in_host_memory(self, ownership: Ownership, stages: Sequence[int]) -> Tier:
        layouts = _layouts(ownership, stages)
        return MemoryTier(layouts, fabric=self.ranks, page_lock=self.device.page_lock)

    def _on_disk(self, ownership: Ownership, stages: Sequence[int]) -> Tier:
        """Build the disk tier of some stages. The host's first rank creates the files, others open them.

        A rank uses the files if it updates stages or reads weights. In the user's loop every rank may read
        weights at any time, so updates are then written to the files at once.
        """
        folder, layouts = self.settings.folder, _layouts(ownership, stages)
        assert folder is not None, "settings with stages on disk name a folder"
        kept = [ownership.host_groups(stage) for stage in stages]
        sizes = file_sizes(layouts, folder, kept).values()
        checksums = None
        if self.verify:
            checksums = [self.ranks.allocate(checksum_bytes(size)) for size in sizes]
        make = functools.partial(
            DiskTier,
            layouts,
            folder,
            verify=self.verify,
            kept=kept,
            checksums=checksums,
            write_behind=not self.settings.user_loop or self.ranks.local_size == 1,
        )
        # The other ranks open the leader's files by the descriptors that it sends below.
        tier = make() if self.ranks.local_rank == 0 else None
        every = self.ranks.gather_objects([] if tier is None else tier.origins, list[Path])
        if tier is not None:
            return tier
        reads = self.settings.user_loop or (self.ranks.computes and not self.settings.shares_slabs)
        if reads or any(ownership.updates(stage) for stage in stages):
            return make(origins=every[self.ranks.rank - self.ranks.local_rank])
        return ElsewhereTier(layouts)


def _layouts(ownership: Ownership, stages: Sequence[int]) -> list[StageLayout]:
    return [ownership.layouts[stage] for stage in stages]
