"""The memory tier: every stage in host memory, changed where it lies."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from headwater.core.buffers import aligned_empty
from headwater.fabric.fabric import ALONE, Fabric
from headwater.store.layout import Group, StageLayout
from headwater.store.tier import Tier


class MemoryTier(Tier):
    """One wire image and one rest per stage.

    Args:
        layouts: one per stage.
        pin: page-lock the wire images, for asynchronous copies to a CUDA device.
        fabric: the ranks that share the memory.
    """

    is_shared = True

    def __init__(self, layouts: list[StageLayout], *, pin: bool = False, fabric: Fabric = ALONE) -> None:
        super().__init__(layouts)
        shared = fabric.size > 1
        self._wire = [
            fabric.allocate(layout.wire_bytes) if shared else aligned_empty(layout.wire_bytes, pin=pin)
            for layout in layouts
        ]
        self._rest = [fabric.allocate(layout.rest_bytes) for layout in layouts]

    def resident_wire(self, stage: int) -> torch.Tensor:
        return self._wire[stage]

    def read_wire(self, stage: int, into: torch.Tensor) -> None:
        into.copy_(self._wire[stage][: into.numel()])

    def write_wire(self, stage: int, image: torch.Tensor) -> None:
        self._wire[stage][: image.numel()].copy_(image)

    def groups(
        self, stage: int, *, read: bool = True, write: bool, params: Collection[int] | None = None
    ) -> Iterator[tuple[Group, torch.Tensor]]:
        for group in self.layouts[stage].groups_of(params):
            yield group, self._rest[stage][group.offset : group.offset + group.num_bytes]

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self._wire, self._rest = [], []
