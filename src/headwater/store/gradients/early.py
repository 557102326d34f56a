"""The norms of gradient sums of several ranks, which may be taken during the backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, final

import torch

from headwater.core.stage import ParamKey
from headwater.store.gradients.norms import gradient_norm

if TYPE_CHECKING:
    from headwater.store.gradients.rank_sums import RankSums


@final
class EarlySums:
    """Measures sums, also during the backward. Each rank measures a part of them, and all read every norm.

    Attributes:
        taken: sums of the present step that updates in the backward have taken.

    Args:
        sums: the sums of all ranks of the host.
    """

    def __init__(self, sums: RankSums) -> None:
        self._sums = sums
        self._keys: dict[int, list[ParamKey]] = {}
        for key in sums.keys:
            self._keys.setdefault(key[0], []).append(key)
        self.taken: set[ParamKey] = set()

    def keys(self, stage: int) -> list[ParamKey]:
        """Return the trained parameters of a stage."""
        return self._keys[stage]

    def are_whole(self, stage: int) -> bool:
        """True if all ranks have added their gradients of this micro-batch to the sums of a stage."""
        return all(map(self._sums.is_whole, self.keys(stage)))

    def measure(self, keys: Iterable[ParamKey]) -> None:
        """Measure those of the sums that this rank has to measure."""
        for key in keys:
            if self._sums.is_mine(key):
                self._sums.norms[self._sums.slots[key]] = gradient_norm(self._sums.storage.read(key))

    def norms(self, stage: int) -> dict[ParamKey, torch.Tensor]:
        """Return the norms of the sums of a stage, which all ranks have measured."""
        # These are copies, because the next step overwrites the shared memory.
        return {key: self._sums.norms[self._sums.slots[key]].clone() for key in self.keys(stage)}
