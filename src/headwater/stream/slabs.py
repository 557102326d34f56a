"""Slabs (device memory for one stage each), and the directory of slabs that the ranks of a host share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt
import torch

from headwater.core.errors import HeadwaterError
from headwater.core.stage import StageSpec
from headwater.core.streams import Event
from headwater.fabric.fabric import Fabric
from headwater.plan.belady import CachePolicy, slab_capacity

NO_VERSION = -1

_TEXT_BYTES = 2000


class Slab:
    """Device memory for one stage at a time, of a certain size class. Counts the views that exist of it."""

    def __init__(self, buffer: torch.Tensor, index: int, slab_class: int) -> None:
        self.buffer = buffer
        self.index = index
        self.slab_class = slab_class
        self.stage: int | None = None
        self.version = NO_VERSION  # version of the stage in the slab
        self.ready: Future[Event] | None = None  # its event: the copy into the slab is done
        self._storage = buffer.untyped_storage()
        # References are counted now, because torch and this object hold some themselves.
        self._own_references = self._references()

    def _references(self) -> int:
        count: int = torch._C._storage_Use_Count(self._storage._cdata)
        return count

    @property
    def in_use(self) -> bool:
        """True if a view of the slab exists, for example in a bound parameter or a running operator."""
        return self._references() > self._own_references

    @property
    def busy(self) -> bool:
        return self.ready is not None and not self.ready.done()


class SlabPool:
    """All slabs of a device, in size classes: stages of equal size share slabs.

    Attributes:
        slabs: all slabs, in the same order on every rank that shares them.
        slab_class: size class of each stage.
        capacity: number of slabs of each class.
        holds_all: true if every stage that needs a slab has a separate one.

    Args:
        stages: the stages.
        slabs: maximum number of slabs of each class.
        allocate: returns memory for a slab, given its bytes.
        in_place: indices of the stages that need no slab.
    """

    def __init__(
        self,
        stages: Sequence[StageSpec],
        slabs: int,
        allocate: Callable[[int], torch.Tensor],
        in_place: Collection[int] = (),
    ) -> None:
        self.slab_class = [stage.slab_bytes for stage in stages]  # stages of equal size share slabs
        in_slabs = [size for stage, size in enumerate(self.slab_class) if stage not in in_place]
        self.capacity = slab_capacity(in_slabs, slabs)
        self.holds_all = sum(self.capacity.values()) == len(in_slabs)
        sizes = [size for size, count in self.capacity.items() for _ in range(count)]
        self.slabs = [Slab(allocate(size), index, size) for index, size in enumerate(sizes)]

    def policy(self, schedule: Sequence[int]) -> CachePolicy:
        """Return the rule by which these slabs are filled in the order of a schedule."""
        return CachePolicy(schedule, self.slab_class, self.capacity)

    def has_views(self, stage: int) -> bool:
        """True if views of the slab of a stage exist, so that no other stage can get it."""
        return any(slab.stage == stage and slab.in_use for slab in self.slabs)

    def close(self) -> None:
        """Free the memory."""
        self.slabs.clear()


@dataclasses.dataclass(frozen=True)
class Want:
    """A request of a rank for a stage in a certain version.

    Attributes:
        stage: the stage.
        version: the version of the stage; see `WeightStore.version`.
    """

    stage: int
    version: int


class SlabDirectory:
    """A table in shared memory: the stage in each slab of a host, the ranks that hold it, and waiting ranks.

    [Note: shared slabs]
    The host's leader fills slabs, and the other ranks compute from them. A rank that needs a stage looks for
    its slab and records that it holds the slab. If the stage is in no slab, the rank records its want, and
    the leader fetches the stage. The leader gives a slab to another stage only when no rank holds it. Each of
    these operations is one exclusive section. When a rank looks for a stage, and when its forward or backward
    ends, it releases all slabs without views. So a waiting rank holds only slabs that it is using. The plan
    provides enough slabs for that.

    Args:
        fabric: the ranks.
        num_slabs: number of slabs.
    """

    def __init__(self, fabric: Fabric, num_slabs: int) -> None:
        self._fabric = fabric
        self._rank, ranks = fabric.local_rank, fabric.local_size
        self._content = _integers(fabric, num_slabs, 2)  # stage and version; no stage has version 0
        self._holds = _integers(fabric, num_slabs, ranks)
        self._wants = _integers(fabric, ranks, 3)  # stage, version (0: nothing), and position in the schedule
        self._text = fabric.allocate(_TEXT_BYTES).numpy()

    def exclusive(self) -> AbstractContextManager[object]:
        """Return the host's lock. Changes of the table are made while it is held."""
        return self._fabric.exclusive()

    # the leader

    def publish(self, slab: int, want: Want) -> None:
        """Record that a slab now has the stage and version of `want`."""
        with self.exclusive():
            self._content[slab] = want.stage, want.version

    def withdraw(self, slab: int) -> None:
        """Record that a slab has no stage any more."""
        # No stage has version 0, so `find` cannot return this slab.
        self._content[slab] = 0

    def is_held(self, slab: int) -> bool:
        """True if another rank holds a slab."""
        return bool(self._holds[slab].any())

    def wants(self) -> list[Want]:
        """Return the requests of all ranks that wait for a stage."""
        return [Want(int(stage), int(version)) for stage, version, _ in self._wants if version]

    def positions(self) -> list[int]:
        """Return the positions of the other computing ranks in their schedules."""
        first = self._fabric.rank - self._rank
        others = [rank for rank in range(len(self._wants)) if rank != self._rank]
        return [int(self._wants[rank][2]) for rank in others if first + rank < self._fabric.num_csx]

    def fail(self, text: str) -> None:
        """Record why a stage cannot be fetched. From then on every rank that waits for a stage raises this.

        The text is never cleared. The ranks give up the step at different places. If they continued, a rank
        could take part in a collective of another step.
        """
        # The text is padded with zeros, which overwrite the rest of an earlier, longer one.
        data = text.encode()[: _TEXT_BYTES - 1].ljust(_TEXT_BYTES, b"\0")
        self._text[:_TEXT_BYTES] = np.frombuffer(data, np.uint8)

    # the others

    def find(self, want: Want) -> int | None:
        """Return the index of the slab that has this stage and version, or `None`."""
        found = np.flatnonzero((self._content == (want.stage, want.version)).all(1))
        return int(found[0]) if len(found) else None

    def hold(self, slab: int) -> None:
        """Record that this rank holds a slab, so that the slab keeps its stage until `release`."""
        self._holds[slab, self._rank] = 1

    def holds(self, slab: int) -> bool:
        """True if this rank holds a slab."""
        return bool(self._holds[slab, self._rank])

    def release(self, slab: int) -> None:
        """Record that this rank does not hold a slab any more; see `hold`."""
        self._holds[slab, self._rank] = 0

    def want(self, want: Want | None) -> None:
        """Record the request for which this rank waits, or `None` if it does not wait."""
        self._wants[self._rank, :2] = (0, 0) if want is None else (want.stage, want.version)

    def move_to(self, position: int) -> None:
        """Record the position of this rank in its schedule."""
        self._wants[self._rank, 2] = position

    @property
    def failure(self) -> str:
        """The reason why the leader cannot fetch a stage; empty if it can."""
        return bytes(self._text).rstrip(b"\0").decode(errors="replace")


def reason(error: Exception) -> str:
    """Return the text of an error for `SlabDirectory.fail`."""
    return error.what if isinstance(error, HeadwaterError) else repr(error)


def _integers(fabric: Fabric, rows: int, columns: int) -> npt.NDArray[np.int64]:
    count = 8 * rows * columns
    values: npt.NDArray[np.int64] = fabric.allocate(count)[:count].view(torch.int64).numpy()
    return values.reshape(rows, columns)
