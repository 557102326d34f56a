"""Slabs: memory for one stage at a time, and what ranks that share slabs know of each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt
import torch

from headwater.core.stage import StageSpec
from headwater.fabric.fabric import Fabric
from headwater.plan.belady import slab_capacity

NO_VERSION = -1

_TEXT_BYTES = 2000


class Slab:
    """Memory for one stage of its class, and whoever in this process still holds a view of it."""

    def __init__(self, buffer: torch.Tensor, index: int, slab_class: int) -> None:
        self.buffer = buffer
        self.index = index
        self.slab_class = slab_class
        self.stage: int | None = None
        self.version = NO_VERSION  # of the stage that it holds
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


class SlabPool:
    """The slabs of each size class.

    Attributes:
        slabs: all of them; the same on every rank that shares them.
        slab_class: size class of each stage.
        capacity: number of slabs of each class.
        holds_all: whether every stage has a slab, which is its own then.

    Args:
        stages: the stages.
        slabs: slabs of each class, at most.
        allocate: gives memory for one of so many bytes.
    """

    def __init__(
        self, stages: Sequence[StageSpec], slabs: int, allocate: Callable[[int], torch.Tensor]
    ) -> None:
        self.slab_class = slab_classes(stages)
        self.capacity = slab_capacity(self.slab_class, slabs)
        self.holds_all = sum(self.capacity.values()) == len(stages)
        sizes = [size for size, count in self.capacity.items() for _ in range(count)]
        self.slabs = [Slab(allocate(size), index, size) for index, size in enumerate(sizes)]

    def close(self) -> None:
        """Give back the memory."""
        self.slabs.clear()


def slab_classes(stages: Sequence[StageSpec]) -> list[int]:
    """Size class of each stage: stages of equal size share their slabs."""
    return [stage.slab_bytes for stage in stages]


@dataclasses.dataclass(frozen=True)
class Want:
    """What a rank waits for.

    Attributes:
        stage: which stage.
        version: of it; see `WeightStore.version`.
    """

    stage: int
    version: int


class SlabDirectory:
    """What lies in the slabs that the ranks of a host share, who holds which, and who waits for what.

    [Note: shared slabs]
    The host's leader fills slabs, the others compute from them. A rank that wants a stage looks for it, and
    notes that it holds the slab; if the stage is not there it notes what it wants, and the leader brings it.
    The leader gives a slab to another stage when nobody holds it. Each of these is one exclusive section. A
    rank lets go of what it has no views of when it looks for a stage, and when its forward or backward
    ends; so whatever else it waits for it never holds more than it can use at once, and the plan has slabs
    for that.

    Args:
        fabric: the ranks.
        num_slabs: how many there are.
    """

    def __init__(self, fabric: Fabric, num_slabs: int) -> None:
        self._fabric = fabric
        self._rank, ranks = fabric.local_rank, fabric.local_size
        self._content = _integers(fabric, num_slabs, 2)  # stage and version; no stage has version 0
        self._holds = _integers(fabric, num_slabs, ranks)
        self._wants = _integers(fabric, ranks, 3)  # stage, version (0: nothing), and position in the schedule
        self._text = fabric.allocate(_TEXT_BYTES).numpy()

    def exclusive(self) -> AbstractContextManager[object]:
        """What is read within it stays so until it ends."""
        return self._fabric.exclusive()

    # the leader

    def publish(self, slab: int, want: Want) -> None:
        """Say what lies in a slab."""
        with self.exclusive():
            self._content[slab] = want.stage, want.version

    def withdraw(self, slab: int) -> None:
        """Say that nothing lies in a slab any more."""
        self._content[slab] = 0

    def is_held(self, slab: int) -> bool:
        """Whether another rank holds a slab."""
        return bool(self._holds[slab].any())

    def wants(self) -> list[Want]:
        """What ranks wait for."""
        return [Want(int(stage), int(version)) for stage, version, _ in self._wants if version]

    def positions(self) -> list[int]:
        """Where the others that compute are in their schedules."""
        first = self._fabric.rank - self._rank
        others = [rank for rank in range(len(self._wants)) if rank != self._rank]
        return [int(self._wants[rank][2]) for rank in others if first + rank < self._fabric.num_csx]

    def fail(self, text: str) -> None:
        """Say that a stage cannot be brought."""
        data = text.encode()[: _TEXT_BYTES - 1]
        self._text[: len(data)] = np.frombuffer(data, np.uint8)

    # the others

    def find(self, want: Want) -> int | None:
        """The slab in which a stage lies."""
        found = np.flatnonzero((self._content == (want.stage, want.version)).all(1))
        return int(found[0]) if len(found) else None

    def hold(self, slab: int) -> None:
        """Keep a slab as it is until `let_go`."""
        self._holds[slab, self._rank] = 1

    def holds(self, slab: int) -> bool:
        """Whether this rank holds a slab."""
        return bool(self._holds[slab, self._rank])

    def let_go(self, slab: int) -> None:
        """See `hold`."""
        self._holds[slab, self._rank] = 0

    def want(self, want: Want | None) -> None:
        """Say what this rank waits for."""
        self._wants[self._rank, :2] = (0, 0) if want is None else (want.stage, want.version)

    def move_to(self, position: int) -> None:
        """Say where this rank is in its schedule."""
        self._wants[self._rank, 2] = position

    @property
    def failure(self) -> str:
        """Why the leader cannot bring a stage; empty if it can."""
        return bytes(self._text).rstrip(b"\0").decode(errors="replace")


def _integers(fabric: Fabric, rows: int, columns: int) -> npt.NDArray[np.int64]:
    count = 8 * rows * columns
    values: npt.NDArray[np.int64] = fabric.allocate(count)[:count].view(torch.int64).numpy()
    return values.reshape(rows, columns)
