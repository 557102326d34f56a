"""The choice of the stages to prefetch, while the computation moves through a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from headwater.plan.belady import CachePolicy


@final
class ReadAhead:
    """The positions of the computation and of the prefetches in a schedule. The caller fetches the stages.

    Attributes:
        policy: the schedule, and the rule by which stages are evicted.
        position: position of the last use; -1 before the first.

    Args:
        policy: the schedule, and the rule by which stages are evicted.
        repeats: true if the schedule is repeated with the same weights. Otherwise no use after its end is
            prepared, because the weights change there.
    """

    def __init__(self, policy: CachePolicy, *, repeats: bool = False) -> None:
        self.policy = policy
        self.position = -1
        self._repeats = repeats
        self._fetched_to = -1  # up to this position every stage is in a slab

    def move_to(self, stage: int) -> None:
        """Set the position to the next use of a stage."""
        self.position = self.policy.position_of(stage, self.position)

    def restart(self) -> None:
        """Begin `uses` at the present position again, because a stage in a slab may be evicted."""
        self._fetched_to = self.position

    def note_fetched(self, position: int) -> None:
        """Record that all stages from the present position up to this one are in slabs."""
        self._fetched_to = position

    def uses(self) -> Iterator[tuple[int, int]]:
        """Yield stage and position of the uses to prepare, the next one first."""
        start = self._fetched_to = max(self._fetched_to, self.position)
        last = len(self.policy.schedule) - 1
        if self._repeats:
            last += self.position + 1
        for distance, stage in self.policy.upcoming(start):
            if start + distance > last:
                return
            yield stage, start + distance
