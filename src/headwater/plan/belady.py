"""Cache policy of the slabs: Belady's rule on a known schedule that repeats every step.

A cache that knows all future uses evicts the entry whose next use is furthest away (L. A. Belady, "A study of
replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966). Needs no torch.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

NEVER = 1 << 62
"""Distance to the next use of a stage that is not in the schedule."""


def slab_capacity(slab_class: Sequence[int], slabs: int) -> dict[int, int]:
    """Return the number of slabs of each size class: `slabs`, or the number of its stages if that is less."""
    return {key: min(slabs, count) for key, count in Counter(slab_class).items()}


def slab_positions(schedule: Sequence[int], in_place: Collection[int]) -> list[int]:
    """Return the positions in a schedule of the stages that need a slab: those that are not read in place."""
    return [position for position, stage in enumerate(schedule) if stage not in in_place]


class CachePolicy:
    """Decides evictions and prefetches. The executor carries them out, and does not report back.

    A position is the number of uses since the beginning of a step. The schedule repeats in every step, so a
    position may be larger than its length.

    Args:
        schedule: stage at each use of one step.
        slab_class: size class of each stage; a slab holds only stages of its class.
        capacity: number of slabs of each class.
    """

    def __init__(
        self, schedule: Sequence[int], slab_class: Sequence[int], capacity: Mapping[int, int]
    ) -> None:
        self.schedule = tuple(schedule)
        self.slab_class = tuple(slab_class)
        self.capacity = dict(capacity)
        self._positions: dict[int, list[int]] = {}
        for position, stage in enumerate(self.schedule):
            assert self.capacity[self.slab_class[stage]] >= 1, f"no slab for stage {stage}"
            self._positions.setdefault(stage, []).append(position)

    def next_use(self, stage: int, position: int) -> int:
        """Return how many uses after `position` the next use of `stage` is (at least 1), or `NEVER`."""
        positions = self._positions.get(stage)
        if not positions:
            return NEVER
        start = position % len(self.schedule)
        index = bisect_right(positions, start)
        if index < len(positions):
            return positions[index] - start
        return positions[0] + len(self.schedule) - start

    def position_of(self, stage: int, position: int) -> int:
        """Return the position of the first use of `stage` at `position` or after it."""
        # Before the first use the position is -1, which is not a use of this step.
        is_here = (
            position >= 0 and bool(self.schedule) and self.schedule[position % len(self.schedule)] == stage
        )
        distance = self.next_use(stage, position)
        return position if is_here or distance == NEVER else position + distance

    def choose_victim(
        self,
        stage: int,
        position: int,
        candidates: Iterable[int],
        *,
        use_at: int | None = None,
        others: Sequence[int] = (),
    ) -> int | None:
        """Return the stage to evict. Its slab then becomes free for `stage`.

        Args:
            stage: the stage that needs a slab.
            position: the use that runs now.
            candidates: stages in a slab that are not pinned; those of other classes are skipped.
            use_at: position of the use for which `stage` is fetched, if that is later than `position`.
            others: positions of other ranks that use the same slabs. Stages that they soon use are kept.

        Returns:
            The candidate whose next use is furthest. `None` without candidates, or if all of them are used
            before `use_at`.
        """
        wanted = self.slab_class[stage]
        rivals = (other for other in candidates if other != stage and self.slab_class[other] == wanted)
        positions = (position, *others)
        distances = ((min(self.next_use(other, each) for each in positions), other) for other in rivals)
        furthest, victim = max(distances, default=(0, None))
        ahead = 0 if use_at is None else use_at - position
        return victim if furthest > ahead else None

    def upcoming(self, position: int) -> Iterator[tuple[int, int]]:
        """Yield `(distance, stage)` of every use after `position`, for one round of the schedule."""
        length = len(self.schedule)
        for distance in range(1, length + 1):
            yield distance, self.schedule[(position + distance) % length]


def slab_policy(
    schedule: Sequence[int], slab_class: Sequence[int], slabs: int, in_place: Collection[int]
) -> CachePolicy:
    """Return the policy for the uses of stages that need a slab; its positions are those of `slab_positions`.

    Args:
        schedule: stage at each use of one step.
        slab_class: size class of each stage.
        slabs: maximum number of slabs of each class.
        in_place: stages that need no slab.
    """
    classes = [size for stage, size in enumerate(slab_class) if stage not in in_place]
    uses = [schedule[position] for position in slab_positions(schedule, in_place)]
    return CachePolicy(uses, slab_class, slab_capacity(classes, slabs))


@dataclasses.dataclass(frozen=True)
class Use:
    """One use in a replay of the schedule.

    Attributes:
        position: position in the schedule.
        stage: the stage used.
        fetched: True if the stage had to be fetched for this use.
        resident: the stages that are in slabs during this use.
    """

    position: int
    stage: int
    fetched: bool
    resident: frozenset[int]


def replay(policy: CachePolicy, rounds: int) -> Iterator[Use]:
    """Yield every use of `rounds` steps; all slabs are empty at first. A stage is fetched when it is used."""
    resident: set[int] = set()
    filled: Counter[int] = Counter()
    for position in range(rounds * len(policy.schedule)):
        stage = policy.schedule[position % len(policy.schedule)]
        fetched = stage not in resident
        if fetched:
            slab_class = policy.slab_class[stage]
            if filled[slab_class] == policy.capacity[slab_class]:
                victim = policy.choose_victim(stage, position, resident)
                assert victim is not None, f"class {slab_class} is full, yet nothing can be evicted"
                resident.remove(victim)
            else:
                filled[slab_class] += 1
            resident.add(stage)
        yield Use(position % len(policy.schedule), stage, fetched, frozenset(resident))


def fetched_positions(policy: CachePolicy) -> tuple[int, ...]:
    """Return the positions at which a step fetches a stage."""
    # The first round begins with empty slabs, every later round with the slabs that the round before filled.
    uses = list(replay(policy, rounds=2))[len(policy.schedule) :]
    return tuple(use.position for use in uses if use.fetched)
