"""Weights in slabs that the leader of the host fills for the host's other ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from headwater.core.errors import StreamError
from headwater.core.stage import StageSpec
from headwater.fabric.fabric import Fabric
from headwater.stream.slabs import Slab, SlabDirectory, SlabPool, Want
from headwater.stream.weights import NOTHING, WeightsInSlabs

if TYPE_CHECKING:
    from headwater.store.store import WeightStore


class BorrowedWeights(WeightsInSlabs):
    """Weights on a rank that is not its host's leader: the leader fetches them into shared slabs.

    See [Note: shared slabs].

    Args:
        store: the weight store, which has the present version of each stage.
        stages: the stages.
        slabs: maximum number of slabs of each size class; the same as on the leader.
        fabric: the ranks that share them.
        in_place: indices of the stages that are never required here, and need no slab.
    """

    def __init__(
        self,
        store: WeightStore,
        stages: Sequence[StageSpec],
        slabs: int,
        fabric: Fabric,
        in_place: Collection[int] = (),
    ) -> None:
        super().__init__(stages)
        self._store = store
        self._fabric = fabric
        self._pool = SlabPool(stages, slabs, fabric.allocate, in_place)
        self._directory = SlabDirectory(fabric, len(self._pool.slabs))
        self.stable = self._pool.holds_all
        self._policy = self._pool.policy([])
        self._position = 0
        self._wanted = NOTHING  # last stage of `require`; its caller may not hold a view yet

    def begin(self, schedule: Sequence[int], *, repeats: bool = False) -> None:
        self._policy = self._pool.policy(schedule)
        self._move_to(-1)
        self.allow_eviction()

    def allow_eviction(self) -> None:
        self._wanted = NOTHING
        with self._directory.exclusive():
            self._release_unused()

    def look_ahead(self) -> None:
        # The use of the next stage may wait for the leader, which may need a slab that this rank holds.
        self.allow_eviction()

    def _move_to(self, position: int) -> None:
        self._position = position
        self._directory.move_to(position)

    def _release_unused(self) -> None:
        """Release every slab that this rank has no view of, except the slab of the stage `_wanted`."""
        for slab in self._pool.slabs:
            if slab.stage not in (None, self._wanted) and not slab.in_use:
                slab.stage = None
                self._directory.release(slab.index)

    def _require(self, stage: int) -> torch.Tensor:
        want = Want(stage, self._store.version(stage))
        self._move_to(self._policy.position_of(stage, self._position))
        slab = self._take(want)
        if slab is not None:
            self.statistics.hits += 1
            return slab.buffer
        self.statistics.misses += 1
        while slab is None:
            what = f"rank 0 of this host to bring stage {self._stages[stage].name!r}"
            self._fabric.wait_until(lambda: self._is_there(want), what)
            # The leader may have evicted the stage again, so this may fail and wait once more.
            slab = self._take(want)
        return slab.buffer

    def has_views(self, stage: int) -> bool:
        return self._pool.has_views(stage)

    def _take(self, want: Want) -> Slab | None:
        """Hold and return the slab of a stage. If the stage is in no slab, ask the leader; return `None`."""
        with self._directory.exclusive():
            # The caller has made its views of the former stage by now, so `_release_unused` sees them.
            self._wanted = NOTHING
            # This comes before the wait: the leader may need the slab that this rank no longer uses.
            self._release_unused()
            index = self._directory.find(want)
            self._directory.want(want if index is None else None)
            if index is None:
                return None
            # This is inside the lock of `find`: otherwise the leader could evict the stage in between.
            self._directory.hold(index)
            slab = self._pool.slabs[index]
            slab.stage = self._wanted = want.stage
            return slab

    def _is_there(self, want: Want) -> bool:
        if self._directory.failure:
            raise StreamError(self._directory.failure, remedy="see the error of the first rank of this host")
        return self._directory.find(want) is not None

    def close(self) -> None:
        with self._directory.exclusive():
            # Otherwise the leader would fetch for a rank that is gone.
            self._directory.want(None)
        self._pool.close()
