"""Weights on the device: in slabs that are filled ahead of use, or where they lie in the store."""

from __future__ import annotations

import abc
import dataclasses
import gc
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from headwater.core.errors import StreamError
from headwater.core.stage import StageSpec
from headwater.core.threads import single_core_pool
from headwater.plan.belady import NEVER, CachePolicy
from headwater.store.store import WeightStore
from headwater.stream.device import Device


@dataclasses.dataclass
class StreamStatistics:
    """What a step has moved.

    Attributes:
        bytes_in: wire bytes of weights brought to slabs.
        bytes_out: bytes of gradients given to the store.
        hits: uses whose weights were on the device, or on their way, when they were wanted.
        misses: uses that found them absent.
        wait_s: seconds for which the compute thread waited for weights.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    hits: int = 0
    misses: int = 0
    wait_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Share of uses that were hits; 1 where there were none."""
        uses = self.hits + self.misses
        return self.hits / uses if uses else 1.0


class Weights(abc.ABC):
    """Brings each stage to the device when it is used. Called by the compute thread only.

    Attributes:
        stable: whether the memory that `require` returned is the stage's for good, so that nothing that
            autograd saves of it needs to be looked up again. Its values change when the stage is updated.
    """

    stable: bool

    def __init__(self) -> None:
        self.statistics = StreamStatistics()

    @abc.abstractmethod
    def begin(self, schedule: Sequence[int], *, repeats: bool = False) -> None:
        """Say in which order stages will be used from now on, and that committed updates are to be seen.

        Args:
            schedule: stage at each use.
            repeats: whether it will be gone through again and again with the same weights.
        """

    @abc.abstractmethod
    def require(self, stage: int) -> torch.Tensor:
        """The wire image of a stage on the device, up to date; waits for it if it must."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back memory and threads."""


class InPlaceWeights(Weights):
    """The device computes on the store's own memory; nothing is copied, updates run when a stage is used."""

    stable = True

    def __init__(self, store: WeightStore) -> None:
        super().__init__()
        self._store = store

    def begin(self, schedule: Sequence[int], *, repeats: bool = False) -> None:
        pass

    def require(self, stage: int) -> torch.Tensor:
        self.statistics.hits += 1
        self._store.fetch(stage)
        image = self._store.resident_wire(stage)
        assert image is not None, "only a tier in memory can be read in place"
        return image

    def close(self) -> None:
        pass


_NO_VERSION = -1


class _Slab:
    """Memory for one stage of its class, and whoever still holds a view of it."""

    def __init__(self, buffer: torch.Tensor, slab_class: int) -> None:
        self.buffer = buffer
        self.slab_class = slab_class
        self.stage: int | None = None
        self.version = _NO_VERSION  # of the stage that it holds
        self.ready: Future[None] | None = None
        self._storage = buffer.untyped_storage()
        self._own_references = self._references()

    def _references(self) -> int:
        count: int = torch._C._storage_Use_Count(self._storage._cdata)
        return count

    @property
    def in_use(self) -> bool:
        """Whether a bound parameter, a running operator or anybody else holds a view of the slab."""
        return self._references() > self._own_references

    @property
    def busy(self) -> bool:
        return self.ready is not None and not self.ready.done()


class SlabWeights(Weights):
    """A pool of slabs per size class: Belady's rule decides what leaves, the schedule what is fetched next.

    A slab is given to another stage only when nothing holds a view of it any more; so a weight can never
    change under somebody's hands, whatever the model does with it.

    Args:
        store: where weights come from.
        stages: the stages.
        slabs: slabs of each size class, at most.
        device: where slabs are.
    """

    def __init__(self, store: WeightStore, stages: Sequence[StageSpec], slabs: int, device: Device) -> None:
        super().__init__()
        self._store = store
        self._stages = stages
        self._device = device
        self._slab_class = slab_classes(stages)
        members = {c: [s for s in stages if self._slab_class[s.index] == c] for c in self._slab_class}
        self._capacity = {c: min(slabs, len(group)) for c, group in members.items()}
        self.stable = all(self._capacity[c] == len(group) for c, group in members.items())
        self._slabs = [
            _Slab(device.allocate_slab(group[0].slab_bytes), c)
            for c, group in members.items()
            for _ in range(self._capacity[c])
        ]
        largest = max(stage.slab_bytes for stage in stages)
        disk = store.resident_wire(stages[0].index) is None
        self._staging = device.allocate_staging(largest) if disk else None
        self._resident: dict[int, _Slab] = {}
        self._policy = CachePolicy([], self._slab_class, self._capacity)
        self._position = 0
        self._repeats = False
        self._wanted = -1  # the stage that `require` was last asked for; its caller may not hold a view yet
        # updates run there too: beside a model that computes on the same cores, or with all of them
        pool = single_core_pool if device.reads_host else ThreadPoolExecutor
        self._thread = pool(1, "headwater-fetch")

    def begin(self, schedule: Sequence[int], *, repeats: bool = False) -> None:
        self._repeats = repeats
        self._policy = CachePolicy(schedule, self._slab_class, self._capacity)
        self._position = -1
        for stage in list(self._resident):
            self._drop_if_stale(stage)
        self._prefetch()

    def _is_current(self, stage: int) -> bool:
        slab = self._resident.get(stage)
        return slab is not None and slab.version == self._store.version(stage)

    def _drop_if_stale(self, stage: int) -> None:
        """Let go of a stage that has changed, unless its slab is its own: then it will be filled anew."""
        if stage in self._resident and not self._is_current(stage) and not self.stable:
            self._resident.pop(stage).stage = None

    def require(self, stage: int) -> torch.Tensor:
        self._wanted = stage
        self._drop_if_stale(stage)
        distance = self._policy.next_use(stage, self._position)
        if distance != NEVER and not self._is_here(stage):
            self._position += distance
        if self._is_current(stage):
            self.statistics.hits += 1
            slab = self._resident[stage]
        else:
            self.statistics.misses += 1
            slab = self._resident.get(stage) or self._free_slab(stage)
            self._fetch(stage, slab)
        self._arrived(slab)
        self._prefetch()
        return slab.buffer

    def _arrived(self, slab: _Slab) -> None:
        """Wait for a fetch; after one that failed the next use tries again."""
        assert slab.ready is not None, "a resident stage has been asked for"
        if slab.ready.exception() is not None:
            slab.version = _NO_VERSION
        slab.ready.result()

    def _is_here(self, stage: int) -> bool:
        schedule = self._policy.schedule
        return self._position >= 0 and schedule[self._position % len(schedule)] == stage

    def _prefetch(self) -> None:
        """Fetch what comes next in this step, as far as slabs are free or hold what comes later still."""
        if all(self._is_current(stage.index) for stage in self._stages):
            return
        last = len(self._policy.schedule) - 1
        for distance, stage in self._policy.upcoming(self._position):
            if self._position + distance > last and not self._repeats:
                return  # beyond the step's end the weights will have changed
            self._drop_if_stale(stage)
            if self._is_current(stage):
                continue
            slab = self._resident.get(stage) or self._available_slab(stage, self._position + distance)
            if slab is None:
                return
            self._fetch(stage, slab)

    def _available_slab(self, stage: int, use_at: int | None) -> _Slab | None:
        """A slab that can be given to `stage` now without hurting a use before `use_at`."""
        free = [s for s in self._slabs if s.slab_class == self._slab_class[stage] and self._is_free(s)]
        empty = next((slab for slab in free if slab.stage is None), None)
        if empty is not None:
            return empty
        candidates = {slab.stage: slab for slab in free if slab.stage is not None}
        victim = self._policy.choose_victim(stage, self._position, candidates, use_at=use_at)
        return None if victim is None else candidates[victim]

    def _is_free(self, slab: _Slab) -> bool:
        return slab.stage != self._wanted and not slab.busy and not slab.in_use

    def _free_slab(self, stage: int) -> _Slab:
        """A slab for a stage that is wanted now."""
        slab = self._available_slab(stage, None)
        if slab is None:
            for other in self._slabs:  # what is still on its way may be taken once it has arrived
                if other.busy and other.slab_class == self._slab_class[stage]:
                    assert other.ready is not None
                    other.ready.result()
            slab = self._available_slab(stage, None)
        if slab is None:
            gc.collect()  # an error of an earlier step and the graph it failed in may hold each other
            slab = self._available_slab(stage, None)
        if slab is None:
            raise StreamError(
                f"no slab is free for stage {self._stages[stage].name!r}: views of all are still held",
                remedy="the model, or a kept output or error of an earlier step, holds weights of several "
                "stages at once; let go of it or use more slabs",
            )
        return slab

    def _fetch(self, stage: int, slab: _Slab) -> None:
        if slab.stage is not None:
            self._resident.pop(slab.stage, None)
        slab.stage, slab.version = stage, self._store.version(stage)
        self._resident[stage] = slab
        self.statistics.bytes_in += self._stages[stage].slab_bytes
        slab.ready = self._thread.submit(self._load, stage, slab.buffer, self._device.compute_mark())

    def _load(self, stage: int, buffer: torch.Tensor, mark: object) -> None:
        with torch.no_grad(), self._device.copying(mark):
            if self._staging is None:
                self._store.fetch(stage, buffer)
            else:
                self._store.fetch(stage, self._staging)
                buffer.copy_(self._staging[: buffer.numel()], non_blocking=True)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._slabs.clear()
        self._resident.clear()


def slab_classes(stages: Sequence[StageSpec]) -> list[int]:
    """Size class of each stage: stages of equal size share their slabs."""
    return [stage.slab_bytes for stage in stages]
