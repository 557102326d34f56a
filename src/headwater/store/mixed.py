"""The mixed tier: each stage in one of several tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, final

import torch

from headwater.core.cleanup import on_failure
from headwater.store.layout import Group, StageLayout
from headwater.store.tier import WHOLE, Pages, Tier, all_pages, no_pages

if TYPE_CHECKING:
    from headwater.store.device import DeviceStage

MakeTier = Callable[[Sequence[int]], Tier]
"""Returns a tier for the stages with these indices. The tier counts them from 0."""


@final
class MixedTier(Tier):
    """A tier that passes each call on to the tier of that stage. It holds no bytes itself.

    Args:
        layouts: one per stage.
        tiers: for each tier the indices of its stages, in order, and the function that returns the tier.
            Each stage is in one of them.
    """

    def __init__(
        self,
        layouts: Sequence[StageLayout],
        tiers: Sequence[tuple[Sequence[int], MakeTier]],
    ) -> None:
        super().__init__(layouts)
        self._place: dict[int, tuple[Tier, int]] = {}  # of each stage: its tier, and its number there
        self._tiers: list[Tier] = []
        for stages, make in tiers:
            with on_failure(self.close):  # there may be no room for a later tier
                self._tiers.append(make(stages))
            self._place |= {stage: (self._tiers[-1], number) for number, stage in enumerate(stages)}
        self.writes_behind = any(tier.writes_behind for tier in self._tiers)
        self.reads_pages = all(tier.reads_pages for tier in self._tiers)

    def is_here(self, stage: int) -> bool:
        tier, number = self._place[stage]
        return tier.is_here(number)

    def resident_wire(self, stage: int) -> torch.Tensor | None:
        tier, number = self._place[stage]
        return tier.resident_wire(number)

    def on_device(self, stage: int) -> DeviceStage | None:
        tier, number = self._place[stage]
        return tier.on_device(number)

    def read_wire(self, stage: int, into: torch.Tensor, part: slice = WHOLE) -> None:
        tier, number = self._place[stage]
        tier.read_wire(number, into, part)

    def write_wire(self, stage: int, image: torch.Tensor, part: slice = WHOLE) -> None:
        tier, number = self._place[stage]
        tier.write_wire(number, image, part)

    def groups(
        self, stage: int, groups: Sequence[Group], *, read: Pages = all_pages, write: Pages = no_pages
    ) -> Iterator[tuple[Group, torch.Tensor]]:
        tier, number = self._place[stage]
        return tier.groups(number, groups, read=read, write=write)

    def settle(self) -> None:
        for tier in self._tiers:
            tier.settle()

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()
