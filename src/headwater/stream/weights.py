"""Weights on the device: in slabs that are filled before use, or in the memory of the store."""

from __future__ import annotations

import abc
import dataclasses
import gc
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, final

import torch

from headwater.core.errors import StreamError
from headwater.core.recorder import RECORDER, WAIT
from headwater.core.stage import StageSpec
from headwater.fabric.fabric import ALONE, Fabric
from headwater.plan.belady import slab_positions
from headwater.stream.device import Device
from headwater.stream.read_ahead import ReadAhead
from headwater.stream.slab_loader import SlabLoader
from headwater.stream.slabs import NO_VERSION, Slab, SlabDirectory, SlabPool, Want
from headwater.stream.want_server import WantServer

if TYPE_CHECKING:
    from headwater.store.store import WeightStore

NOTHING = -1
"""A number that is used instead of a stage's index if there is no stage."""


@dataclasses.dataclass
class StreamStatistics:
    """Statistics of one step: how many weights were fetched, and how long the computation waited.

    Attributes:
        bytes_in: wire bytes of weights copied to slabs.
        bytes_out: bytes of gradients added to the store.
        hits: number of uses of a stage that was on the device, or being fetched.
        misses: number of uses of a stage that was neither.
        wait_s: seconds for which the compute thread waited for weights.
    """

    bytes_in: int = 0
    bytes_out: int = 0
    hits: int = 0
    misses: int = 0
    wait_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """The fraction of uses whose stage was on the device or being fetched; 1 if no stage was used."""
        uses = self.hits + self.misses
        return self.hits / uses if uses else 1.0


class Weights(abc.ABC):
    """Interface: provides the weights of a stage on the device. Only the compute thread calls it.

    Attributes:
        stable: true if `require` always returns the same memory for a stage, so that views which autograd
            saves stay valid. The values change when the stage is updated.
        statistics: of the step that runs. `Executor.begin` sets a new object for each step.
    """

    stable: bool

    def __init__(self) -> None:
        self.statistics = StreamStatistics()

    @abc.abstractmethod
    def begin(self, schedule: Sequence[int], *, repeats: bool = False) -> None:
        """Set the order in which stages will be used. Their weights include all updates committed now.

        Args:
            schedule: stage at each use.
            repeats: true if the schedule is repeated with the same weights.
        """

    @abc.abstractmethod
    def allow_eviction(self) -> None:
        """Allow the last stage of `require` to be evicted: its caller has made views, or needs no weights."""

    @abc.abstractmethod
    def require(self, stage: int) -> torch.Tensor:
        """Fetch a stage if necessary, block until it is on the device, and return its wire image."""

    @abc.abstractmethod
    def has_views(self, stage: int) -> bool:
        """True if a slab cannot be given to another stage because views of this stage exist."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release memory, and end threads."""


class InPlaceWeights(Weights):
    """Weights that are used in the store's memory, without a copy. `require` applies pending updates.

    Args:
        store: the weight store.
        device: the device that reads them.
    """

    stable = True

    def __init__(self, store: WeightStore, device: Device) -> None:
        super().__init__()
        self._store = store
        self._device = device

    def begin(self, schedule: Sequence[int], *, repeats: bool = False) -> None:
        pass

    def allow_eviction(self) -> None:
        pass

    def require(self, stage: int) -> torch.Tensor:
        self.statistics.hits += 1
        # Applies the update that waits for the stage.
        self._store.fetch(stage)
        place = self._store.tier.on_device(stage)
        if place is not None:
            place.await_change(self._device.compute)
            return place.wire
        image = self._store.tier.resident_wire(stage)
        assert image is not None, "only a tier in memory can be read in place"
        return image

    def has_views(self, stage: int) -> bool:
        return False

    def close(self) -> None:
        pass


class WeightsInSlabs(Weights):
    """Interface: provides weights in slabs. Other stages may be read in host memory at the same time.

    Args:
        stages: the stages.
    """

    def __init__(self, stages: Sequence[StageSpec]) -> None:
        super().__init__()
        self._stages = stages

    def require(self, stage: int) -> torch.Tensor:
        with RECORDER.span(WAIT, self._stages[stage].name):
            return self._require(stage)

    @abc.abstractmethod
    def _require(self, stage: int) -> torch.Tensor:
        """Do what `require` does."""

    @abc.abstractmethod
    def look_ahead(self) -> None:
        """Prepare for the use of a stage that needs no slab: the last stage of `require` may be evicted."""


class SlabWeights(WeightsInSlabs):
    """Weights in a fixed number of slabs per size class, filled in the order of the schedule.

    Belady's rule selects the stage that is evicted: the one whose next use is farthest away. A slab is given
    to another stage only when no view of it exists, so weights that the model still uses are never
    overwritten. If several ranks of a host share slabs, only the host's leader has an object of this class,
    and fills slabs for all of them; see [Note: shared slabs].

    Args:
        store: the weight store.
        stages: the stages.
        slabs: maximum number of slabs of each size class.
        device: the device of the slabs.
        fabric: the ranks that share the slabs.
        in_place: indices of the stages that are never required here, and need no slab.
    """

    def __init__(
        self,
        store: WeightStore,
        stages: Sequence[StageSpec],
        slabs: int,
        device: Device,
        fabric: Fabric = ALONE,
        in_place: Collection[int] = (),
    ) -> None:
        super().__init__(stages)
        self._store = store
        self._fabric = fabric
        self._pool = SlabPool(stages, slabs, shared_slab(fabric, device), in_place)
        self._directory = SlabDirectory(fabric, len(self._pool.slabs))
        self._loader = SlabLoader(store, stages, self._pool, self._directory, device)
        self.stable = self._pool.holds_all
        self._resident: dict[int, Slab] = {}
        self._ahead = ReadAhead(self._pool.policy([]))
        self._wanted = NOTHING  # last stage of `require`; its caller may not hold a view yet
        self._server = WantServer(self._directory, self._serve) if fabric.local_size > 1 else None

    def begin(self, schedule: Sequence[int], *, repeats: bool = False) -> None:
        with self._directory.exclusive():
            self._ahead = ReadAhead(self._pool.policy(schedule), repeats=repeats)
            for stage in list(self._resident):
                self._drop_if_stale(stage)
            self._prefetch()

    def allow_eviction(self) -> None:
        self._wanted = NOTHING

    def look_ahead(self) -> None:
        # The caller has unbound the last stage: its slab can take another one already.
        self.allow_eviction()
        with self._directory.exclusive():
            self._prefetch()

    def _is_current(self, stage: int) -> bool:
        slab = self._resident.get(stage)
        return slab is not None and slab.version == self._store.version(stage)

    def _drop_if_stale(self, stage: int) -> None:
        """Evict a stage whose slab has an old version. If every stage has its slab, keep it for a refill."""
        if stage in self._resident and not self._is_current(stage) and not self.stable:
            self._resident.pop(stage).stage = None

    def _require(self, stage: int) -> torch.Tensor:
        if self._server is not None:
            self._server.check()
        with self._directory.exclusive():
            self._wanted = stage
            self._ahead.move_to(stage)
            if self._is_current(stage):
                self.statistics.hits += 1
            else:
                self.statistics.misses += 1
                self._ahead.restart()  # the slab may be taken from a stage that was prefetched
        slab = self._place(stage) or self._wait_for_slab(stage)
        self._arrived(slab)
        with self._directory.exclusive():
            self._prefetch()
        return slab.buffer

    def has_views(self, stage: int) -> bool:
        return self._pool.has_views(stage)

    def _arrived(self, slab: Slab) -> None:
        """Make the computation wait for the fetch into a slab.

        If the fetch failed, raise; the next use fetches again.
        """
        assert slab.ready is not None, "the fetch of a resident stage was started"
        # The slab has undefined bytes: it must not count as current.
        if slab.ready.exception() is not None:
            slab.version = NO_VERSION
        # This waits outside of the host's lock, because other ranks look for slabs meanwhile.
        self._loader.await_on_device(slab.ready)

    def _prefetch(self) -> None:
        """Start to fetch the next stages of the schedule, into slabs that are free or needed later."""
        for stage, use_at in self._ahead.uses():
            if not self._bring(stage, use_at):
                return
            self._ahead.note_fetched(use_at)

    def _bring(self, stage: int, use_at: int | None) -> Slab | None:
        """Find a slab for a stage, start the fetch if needed, and return the slab; `None` if none is free."""
        self._drop_if_stale(stage)
        slab = self._resident.get(stage)
        if not self._is_current(stage):
            # A stale stage keeps its slab: with `stable`, parameters point there for ever.
            slab = slab or self._available_slab(stage, use_at)
            if slab is not None:
                self._fetch(stage, slab)
        return slab

    def _available_slab(self, stage: int, use_at: int | None) -> Slab | None:
        """Choose a slab to which `stage` may be fetched now: an empty one, or one whose stage is evicted.

        A stage that is used before `use_at` is not evicted. Return `None` if no slab can be chosen.
        """
        # A stage in a slab without views is still wanted until its caller has made one.
        wanted = {self._wanted, *(want.stage for want in self._directory.wants())}
        slab_class = self._pool.slab_class[stage]
        slabs = [slab for slab in self._pool.slabs if slab.slab_class == slab_class]
        free = [slab for slab in slabs if slab.stage not in wanted and self._is_free(slab)]
        # An empty slab costs no later fetch.
        empty = next((slab for slab in free if slab.stage is None), None)
        if empty is not None:
            return empty
        candidates = {slab.stage: slab for slab in free if slab.stage is not None}
        victim = self._ahead.policy.choose_victim(
            stage, self._ahead.position, candidates, use_at=use_at, others=self._directory.positions()
        )
        return None if victim is None else candidates[victim]

    def _is_free(self, slab: Slab) -> bool:
        return not slab.busy and not slab.in_use and not self._directory.is_held(slab.index)

    def _place(self, stage: int) -> Slab | None:
        """Find a slab for the stage that the computation needs next, and start the fetch if needed.

        Return the slab, or `None` if all are in use.
        """
        with self._directory.exclusive():
            return self._bring(stage, None)

    def _wait_for_slab(self, stage: int) -> Slab:
        """Block until a slab is free, start to fetch `stage` into it, and return the slab.

        Raises:
            StreamError: if no slab becomes free.
        """
        for other in self._pool.slabs:  # a slab may be taken after its fetch is complete
            if other.ready is not None and other.slab_class == self._pool.slab_class[stage]:
                wait([other.ready])
        slab = self._place(stage)
        if slab is None:
            gc.collect()  # the error of an earlier step and its graph may be a reference cycle
            slab = self._place(stage)
        if slab is None and self._fabric.local_size > 1:
            what = f"a slab for stage {self._stages[stage].name!r}"
            self._fabric.wait_until(lambda: self._place(stage) is not None, what)
            slab = self._place(stage)
        if slab is None:
            enough = max(map(self._pool.slab_class.count, self._pool.slab_class))
            raise StreamError(
                f"no slab is free for stage {self._stages[stage].name!r}: views of all slabs are still held",
                remedy="delete outputs and exceptions of earlier steps that your code keeps; in a backward "
                f"with create_graph=True, set activations to keep; otherwise set num_slabs to {enough}",
            )
        return slab

    def _fetch(self, stage: int, slab: Slab) -> None:
        if slab.stage is not None:
            # The former stage must be gone before the loader overwrites its bytes.
            self._resident.pop(slab.stage, None)
        version = self._store.version(stage)
        slab.stage, slab.version = stage, NO_VERSION  # until the copy begins, which a fork refuses
        self._resident[stage] = slab
        # Other ranks must not find the former stage while its bytes are overwritten.
        self._directory.withdraw(slab.index)
        self.statistics.bytes_in += self._stages[stage].slab_bytes
        slab.ready = self._loader.start(slab.index, Want(stage, version))
        slab.version = version

    def _serve(self) -> None:
        """Start to fetch the stages that other ranks request. Runs on the thread of the server."""
        with self._directory.exclusive():
            self._ahead.restart()  # a stage that was fetched ahead may be evicted below
            for want in self._directory.wants():
                if want.version == self._store.version(want.stage):  # else this rank is behind
                    self._bring(want.stage, None)

    def close(self) -> None:
        # The server is closed first, because it starts fetches in the loader.
        if self._server is not None:
            self._server.close()
        self._loader.close()
        # The pool is closed after the loader, whose thread writes to slabs.
        self._pool.close()
        self._resident.clear()


@final
class MixedWeights(Weights):
    """Weights of some stages in the store's own memory, and of the other stages in slabs.

    Args:
        in_memory: indices of the stages that are read in the store's memory.
        in_place: provides these.
        slabs: provides the others.
    """

    def __init__(self, in_memory: Collection[int], in_place: InPlaceWeights, slabs: WeightsInSlabs) -> None:
        super().__init__()
        self._in_memory = in_memory
        self._in_place = in_place
        self._slabs = slabs
        self.stable = slabs.stable

    def begin(self, schedule: Sequence[int], *, repeats: bool = False) -> None:
        # Both count into the statistics of this step.
        self._in_place.statistics = self._slabs.statistics = self.statistics
        in_slabs = [schedule[position] for position in slab_positions(schedule, self._in_memory)]
        self._slabs.begin(in_slabs, repeats=repeats)

    def allow_eviction(self) -> None:
        self._slabs.allow_eviction()

    def require(self, stage: int) -> torch.Tensor:
        if stage not in self._in_memory:
            return self._slabs.require(stage)
        # This is first: the update in `require` takes time, in which slabs can be filled from disk.
        self._slabs.look_ahead()
        return self._in_place.require(stage)

    def has_views(self, stage: int) -> bool:
        return self._slabs.has_views(stage)

    def close(self) -> None:
        self._slabs.close()


def shared_slab(fabric: Fabric, device: Device) -> Callable[[int], torch.Tensor]:
    """Return the function that allocates slabs: in shared memory if the host has several ranks."""
    return device.allocate_slab if fabric.local_size == 1 else fabric.allocate
