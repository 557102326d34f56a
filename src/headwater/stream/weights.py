"""Weights on the device: in slabs that are filled ahead of use, or where they lie in the store."""

from __future__ import annotations

import abc
import dataclasses
import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from headwater.core.buffers import aligned_empty
from headwater.core.errors import HeadwaterError, StreamError
from headwater.core.stage import StageSpec
from headwater.core.threads import single_core_pool
from headwater.fabric.fabric import ALONE, Fabric
from headwater.plan.belady import CachePolicy
from headwater.store.store import WeightStore
from headwater.stream.device import Device
from headwater.stream.slabs import NO_VERSION, Slab, SlabDirectory, SlabPool, Want

NOTHING = -1
"""A stage that nobody has asked for."""

_SERVE_EVERY_S = 5e-4


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
    def rest(self) -> None:
        """Say that whoever has asked for a stage has a view of it now, or wants none."""

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

    def rest(self) -> None:
        pass

    def require(self, stage: int) -> torch.Tensor:
        self.statistics.hits += 1
        self._store.fetch(stage)
        image = self._store.tier.resident_wire(stage)
        assert image is not None, "only a tier in memory can be read in place"
        return image

    def close(self) -> None:
        pass


class SlabWeights(Weights):
    """A pool of slabs per size class: Belady's rule decides what leaves, the schedule what is fetched next.

    A slab is given to another stage only when nothing holds a view of it any more; so a weight can never
    change under somebody's hands, whatever the model does with it. Of ranks that share slabs this is the one
    that leads their host: it fills slabs for all of them, see [Note: shared slabs].

    Args:
        store: where weights come from.
        stages: the stages.
        slabs: slabs of each size class, at most.
        device: where slabs are.
        fabric: the ranks that share them.
    """

    def __init__(
        self,
        store: WeightStore,
        stages: Sequence[StageSpec],
        slabs: int,
        device: Device,
        fabric: Fabric = ALONE,
    ) -> None:
        super().__init__()
        self._store = store
        self._stages = stages
        self._device = device
        self._fabric = fabric
        self._pool = SlabPool(stages, slabs, shared_slab(fabric, device))
        self._directory = SlabDirectory(fabric, len(self._pool.slabs))
        self.stable = self._pool.holds_all
        largest = max(stage.slab_bytes for stage in stages)
        disk = store.tier.resident_wire(stages[0].index) is None
        self._staging = aligned_empty(largest) if disk and not device.reads_host else None
        self._unlock = device.page_lock([] if self._staging is None else [self._staging])
        self._resident: dict[int, Slab] = {}
        self._policy = CachePolicy([], self._pool.slab_class, self._pool.capacity)
        self._position = 0
        self._repeats = False
        self._wanted = NOTHING  # what `require` was last asked for; its caller may not hold a view yet
        # updates run there too: beside a model that computes on the same cores, or with all of them
        pool = single_core_pool if device.reads_host else ThreadPoolExecutor
        self._thread = pool(1, "headwater-fetch")
        self._closing = threading.Event()
        self._server = threading.Thread(target=self._serve, name="headwater-serve", daemon=True)
        if fabric.local_size > 1:
            self._server.start()

    def begin(self, schedule: Sequence[int], *, repeats: bool = False) -> None:
        with self._directory.exclusive():
            self._repeats = repeats
            self._policy = CachePolicy(schedule, self._pool.slab_class, self._pool.capacity)
            self._position = -1
            for stage in list(self._resident):
                self._drop_if_stale(stage)
            self._prefetch()

    def rest(self) -> None:
        self._wanted = NOTHING

    def _is_current(self, stage: int) -> bool:
        slab = self._resident.get(stage)
        return slab is not None and slab.version == self._store.version(stage)

    def _drop_if_stale(self, stage: int) -> None:
        """Let go of a stage that has changed, unless its slab is its own: then it will be filled anew."""
        if stage in self._resident and not self._is_current(stage) and not self.stable:
            self._resident.pop(stage).stage = None

    def require(self, stage: int) -> torch.Tensor:
        with self._directory.exclusive():
            self._wanted = stage
            self._position = self._policy.position_of(stage, self._position)
            if self._is_current(stage):
                self.statistics.hits += 1
            else:
                self.statistics.misses += 1
        slab = self._place(stage) or self._wait_for_slab(stage)
        self._arrived(slab)
        with self._directory.exclusive():
            self._prefetch()
        return slab.buffer

    def _arrived(self, slab: Slab) -> None:
        """Wait for a fetch; after one that failed the next use tries again."""
        assert slab.ready is not None, "a resident stage has been asked for"
        if slab.ready.exception() is not None:
            slab.version = NO_VERSION
        slab.ready.result()

    def _prefetch(self) -> None:
        """Fetch what comes next in this step, as far as slabs are free or hold what comes later still."""
        if all(self._is_current(stage.index) for stage in self._stages):
            return
        last = len(self._policy.schedule) - 1
        for distance, stage in self._policy.upcoming(self._position):
            if self._position + distance > last and not self._repeats:
                return  # beyond the step's end the weights will have changed
            if not self._bring(stage, self._position + distance):
                return

    def _bring(self, stage: int, use_at: int | None) -> Slab | None:
        """The slab that holds a stage, or will; `None` if none is free as `_available_slab` says."""
        self._drop_if_stale(stage)
        slab = self._resident.get(stage)
        if not self._is_current(stage):
            slab = slab or self._available_slab(stage, use_at)
            if slab is not None:
                self._fetch(stage, slab)
        return slab

    def _available_slab(self, stage: int, use_at: int | None) -> Slab | None:
        """A slab that can be given to `stage` now without hurting a use before `use_at`."""
        wanted = {self._wanted, *(want.stage for want in self._directory.wants())}
        slab_class = self._pool.slab_class[stage]
        slabs = [slab for slab in self._pool.slabs if slab.slab_class == slab_class]
        free = [slab for slab in slabs if slab.stage not in wanted and self._is_free(slab)]
        empty = next((slab for slab in free if slab.stage is None), None)
        if empty is not None:
            return empty
        candidates = {slab.stage: slab for slab in free if slab.stage is not None}
        victim = self._policy.choose_victim(
            stage, self._position, candidates, use_at=use_at, others=self._directory.positions()
        )
        return None if victim is None else candidates[victim]

    def _is_free(self, slab: Slab) -> bool:
        return not slab.busy and not slab.in_use and not self._directory.is_held(slab.index)

    def _place(self, stage: int) -> Slab | None:
        """The slab that holds a stage which is wanted now, or will, if one is free."""
        with self._directory.exclusive():
            return self._bring(stage, None)

    def _wait_for_slab(self, stage: int) -> Slab:
        """The same when one has become free."""
        for other in self._pool.slabs:  # what is still on its way may be taken once it has arrived
            if other.ready is not None and other.slab_class == self._pool.slab_class[stage]:
                wait([other.ready])
        slab = self._place(stage)
        if slab is None:
            gc.collect()  # an error of an earlier step and the graph it failed in may hold each other
            slab = self._place(stage)
        if slab is None and self._fabric.local_size > 1:
            what = f"a slab for stage {self._stages[stage].name!r}"
            self._fabric.wait_until(lambda: self._place(stage) is not None, what)
            slab = self._place(stage)
        if slab is None:
            raise StreamError(
                f"no slab is free for stage {self._stages[stage].name!r}: views of all are still held",
                remedy="the model, or a kept output or error of an earlier step, holds weights of several "
                "stages at once; let go of it or use more slabs",
            )
        return slab

    def _fetch(self, stage: int, slab: Slab) -> None:
        if slab.stage is not None:
            self._resident.pop(slab.stage, None)
        slab.stage, slab.version = stage, self._store.version(stage)
        self._resident[stage] = slab
        self._directory.withdraw(slab.index)
        self.statistics.bytes_in += self._stages[stage].slab_bytes
        slab.ready = self._thread.submit(
            self._load,
            slab.index,
            Want(stage, slab.version),
            self._store.ledger.num_commits,
            self._device.compute_mark(),
        )

    def _load(self, index: int, want: Want, up_to: int, mark: object) -> None:
        """Bring what is wanted to a slab; a step that is committed meanwhile can still be undone."""
        stage, buffer = want.stage, self._pool.slabs[index].buffer
        try:
            with torch.no_grad(), self._device.copying(mark):
                if self._staging is None:
                    self._store.fetch(stage, buffer, up_to)
                else:
                    self._store.fetch(stage, self._staging, up_to)
                    buffer.copy_(self._staging[: buffer.numel()], non_blocking=True)
        except HeadwaterError as error:
            self._directory.fail(f"stage {self._stages[stage].name!r} cannot be read: {error.what}")
            raise
        self._directory.publish(index, want)

    def _serve(self) -> None:
        """Bring what other ranks want."""
        while not self._closing.wait(_SERVE_EVERY_S):
            if self._directory.wants():
                with self._directory.exclusive():
                    for want in self._directory.wants():
                        if want.version == self._store.version(want.stage):  # or this rank is not so far yet
                            self._bring(want.stage, None)

    def close(self) -> None:
        self._closing.set()
        if self._server.is_alive():
            self._server.join()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._unlock()
        self._pool.close()
        self._resident.clear()


def shared_slab(fabric: Fabric, device: Device) -> Callable[[int], torch.Tensor]:
    """What gives memory for a slab that the ranks of a host share, if there are several."""
    return device.allocate_slab if fabric.local_size == 1 else fabric.allocate
