"""The memory tier: every stage in host memory, changed in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch

from headwater.core.cleanup import on_failure
from headwater.fabric.fabric import ALONE, Fabric
from headwater.store.layout import Group, StageLayout
from headwater.store.tier import WHOLE, Pages, Tier, all_pages, no_pages


@final
class MemoryTier(Tier):
    """The tier in host memory. Each stage has one block for its wire image, and one for all its groups.

    Args:
        layouts: one per stage.
        fabric: the ranks that share the memory.
        page_lock: locks the pages of the wire images; returns a function that unlocks them.
    """

    writes_behind = False

    def __init__(
        self,
        layouts: Sequence[StageLayout],
        *,
        fabric: Fabric = ALONE,
        page_lock: Callable[[Sequence[torch.Tensor]], Callable[[], None]] = lambda memory: lambda: None,
    ) -> None:
        super().__init__(layouts)
        self._wire = [fabric.allocate(layout.wire_bytes) for layout in layouts]
        self._unlock = page_lock(self._wire)
        with on_failure(self._unlock):  # memory that is freed while it is locked cannot be locked again
            self._rest = [fabric.allocate(layout.rest_bytes) for layout in layouts]

    def is_here(self, stage: int) -> bool:
        return True

    def resident_wire(self, stage: int) -> torch.Tensor:
        return self._wire[stage]

    def on_device(self, stage: int) -> None:
        return None

    def read_wire(self, stage: int, into: torch.Tensor, part: slice = WHOLE) -> None:
        into[part].copy_(self._wire[stage][: into.numel()][part])

    def write_wire(self, stage: int, image: torch.Tensor, part: slice = WHOLE) -> None:
        self._wire[stage][: image.numel()][part].copy_(image[part])

    def groups(
        self, stage: int, groups: Sequence[Group], *, read: Pages = all_pages, write: Pages = no_pages
    ) -> Iterator[tuple[Group, torch.Tensor]]:
        for group in groups:
            yield group, self._rest[stage][group.offset : group.offset + group.num_bytes]

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self._unlock()
        self._wire, self._rest = [], []
