"""The mixed tier: some stages in one tier, the others in a second one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import final

import torch

from headwater.core.cleanup import on_failure
from headwater.store.layout import Group, StageLayout
from headwater.store.tier import WHOLE, Pages, Tier, all_pages

MakeTier = Callable[[Sequence[StageLayout]], Tier]
"""Returns a tier for some stages, which it counts from 0."""


@final
class MixedTier(Tier):
    """A tier that passes each call on to the tier of that stage. It holds no bytes itself.

    Args:
        layouts: one per stage.
        first: indices of the stages in the first tier; the others are in the second one.
        make_first: returns the first tier for the layouts of its stages.
        make_second: likewise the second one.
    """

    def __init__(
        self,
        layouts: Sequence[StageLayout],
        first: Collection[int],
        make_first: MakeTier,
        make_second: MakeTier,
    ) -> None:
        super().__init__(layouts)
        self._place: dict[int, tuple[Tier, int]] = {}  # of each stage: its tier, and its number there
        self._tiers: list[Tier] = []
        for make, is_first in ((make_first, True), (make_second, False)):
            stages = [stage for stage in range(len(layouts)) if (stage in first) == is_first]
            with on_failure(self.close):  # there may be no room for the second tier
                self._tiers.append(make([layouts[stage] for stage in stages]))
            self._place |= {stage: (self._tiers[-1], number) for number, stage in enumerate(stages)}
        self.writes_behind = any(tier.writes_behind for tier in self._tiers)

    def resident_wire(self, stage: int) -> torch.Tensor | None:
        tier, number = self._place[stage]
        return tier.resident_wire(number)

    def read_wire(self, stage: int, into: torch.Tensor, part: slice = WHOLE) -> None:
        tier, number = self._place[stage]
        tier.read_wire(number, into, part)

    def write_wire(self, stage: int, image: torch.Tensor, part: slice = WHOLE) -> None:
        tier, number = self._place[stage]
        tier.write_wire(number, image, part)

    def groups(
        self, stage: int, groups: Sequence[Group], *, read: bool = True, write: bool, pages: Pages = all_pages
    ) -> Iterator[tuple[Group, torch.Tensor]]:
        tier, number = self._place[stage]
        return tier.groups(number, groups, read=read, write=write, pages=pages)

    def settle(self) -> None:
        for tier in self._tiers:
            tier.settle()

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()
