"""Access to stages: one thread at a time holds a stage, with all committed updates applied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, final

import torch

from headwater.core.buffers import aligned_empty
from headwater.core.errors import DeviceFullError
from headwater.core.modes import apart_from_modes
from headwater.core.streams import IMMEDIATE, REACHED, Event, Stream
from headwater.core.worker_pools import WorkerPool
from headwater.fabric.fabric import Fabric
from headwater.store.ledger import Ledger, Undone
from headwater.store.locks import StageLocks
from headwater.store.ownership import Ownership
from headwater.store.propagation import Propagation
from headwater.store.tier import Tier
from headwater.store.update import Part

if TYPE_CHECKING:
    from headwater.store.stage_update import StageUpdate


@final
class ImageCopies:
    """The copies of wire images in host memory that may still be running. The caller holds the stage.

    Args:
        fabric: the ranks. If there are several, this rank waits for each copy at once, because another rank
            may change the image without knowing of the copy.
    """

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._running: dict[int, Event] = {}  # by stage, when the last copy of its image is done

    def note(self, stage: int, copied: Event) -> None:
        """Record a copy of the image of a stage.

        Args:
            stage: the stage.
            copied: reached when the copy is done.
        """
        if self._fabric.size > 1:
            copied.synchronize()
        else:
            self._running[stage] = copied

    def wait(self, stage: int) -> None:
        """Block until no copy reads the image of a stage any more."""
        self._running.pop(stage, REACHED).synchronize()


@final
class StageAccess:
    """Gives a thread access to a stage, under the stage's lock and with its pending update applied.

    Attributes:
        locks: the locks of the stages. "To hold a stage" is to hold its lock.
        before_update: called with (stage, number of the commit) just before a commit's update or
            `Parameters.change` changes the stage, by the thread that holds the stage. Snapshots set it.

    Args:
        fabric: the ranks.
        tier: where the bytes lie.
        ownership: which rank updates which pieces.
        ledger: the updates that wait for their stages.
        update: applies a pending update.
    """

    def __init__(
        self, fabric: Fabric, tier: Tier, ownership: Ownership, ledger: Ledger, update: StageUpdate
    ) -> None:
        self._fabric = fabric
        self._tier = tier
        self._ownership = ownership
        self._ledger = ledger
        self._stage_update = update
        self._propagation = Propagation(fabric, ownership, tier)
        self.locks = StageLocks([layout.stage.name for layout in tier.layouts])
        self.before_update: Callable[[int, int], None] = lambda stage, number: None
        self._versions = [0] * len(tier.layouts)
        self._copies = ImageCopies(fabric)
        self._ahead = WorkerPool(1, "headwater-update")

    def version(self, stage: int) -> int:
        """Return a counter. It grows whenever the wire image changes that `fetch` copies."""
        return self._versions[stage]

    def note_change(self, stage: int) -> None:
        """Record that a forward has changed the wire image of a stage in the memory of the tier."""
        self._versions[stage] += 1

    # a stage with all updates applied

    def fetch(
        self, stage: int, into: torch.Tensor | None, up_to: int | None, stream: Stream = IMMEDIATE
    ) -> None:
        """Apply the pending update of a stage, and copy its wire image; see `WeightStore.fetch`."""
        # Another rank may wait for updates of earlier stages, which the forward of this rank has skipped. All
        # ranks apply their updates in the order of stages, so they never wait for each other in a circle.
        for earlier in self._ledger.stages if self._fabric.size > 1 else ():
            if earlier < stage and self._ledger.due(earlier, up_to) is not None:
                self.catch_up(earlier)
        # Before the lock: see `_wait_for_owners`.
        self._wait_for_owners(stage, up_to)
        with self.locks.whole(stage):
            if self._tier.on_device(stage) is not None:
                self._catch_up(stage, None, up_to)
                return
            resident = self._tier.resident_wire(stage)
            if not self._catch_up(stage, into, up_to) and resident is None:
                assert into is not None, "the disk tier needs memory to read a stage into"
                # After an update `into` has the new image already, so a stage is never read twice.
                self._tier.read_wire(stage, into)
            if resident is not None and into is not None:
                count = self._tier.layouts[stage].stage.slab_bytes
                stream.copy(into[:count], resident[:count])
                self._copies.note(stage, stream.record())

    def flush(self, stage: int) -> None:
        """Apply the pending update of a stage."""
        self._wait_for_owners(stage)
        with self.locks.whole(stage):
            self._catch_up(stage, None)

    @contextmanager
    def reading(
        self, stage: int, up_to: int | None, params: Collection[int] | None = None
    ) -> Iterator[torch.Tensor]:
        """Lock a stage for the context, apply its pending update, and yield its wire image for reading.

        In the disk tier only the part of the image that this host updates is read.

        Args:
            stage: the stage.
            up_to: do not apply an update that was committed after this number.
            params: only these parameters are read, by index; the rest of the image may be undefined.
        """
        if up_to is None:  # a snapshot, which passes a number, holds the stage already
            self._wait_for_owners(stage)
        # A snapshot has saved the stages that a lost step may have changed, before they were changed.
        with self.locks.whole(stage, before_step=up_to is not None):
            buffer = self._buffer(stage)
            self._catch_up(stage, buffer, up_to)
            part = self._ownership.own_bytes(stage, params)
            with self._tier.wire(stage, buffer, write=False, part=part) as image:
                yield image

    @contextmanager
    def changing(
        self, stage: int, params: Collection[int] | None = None, *, overwrite: bool = False
    ) -> Iterator[torch.Tensor | None]:
        """Lock a stage for the context, apply its pending update, and yield its wire image to be changed.

        All ranks call this together. The image is `None` on a rank that updates nothing of the stage.

        Args:
            stage: the stage.
            params: only these parameters are changed, by index; the rest of the image may be undefined.
            overwrite: true if the caller writes all values of these parameters before it reads them. Their
                values are undefined then.
        """
        self._fabric.neighbours.barrier("a stage to be changed")  # others may still read the old values
        self._wait_for_owners(stage)
        updates = self._ownership.updates(stage)
        with self.locks.whole(stage):
            # Every rank takes part in the barriers, also one without a piece to change.
            buffer = self._buffer(stage) if updates else None
            # The change must find all committed updates applied: plain PyTorch has applied them too.
            self._catch_up(stage, buffer)
            self._copies.wait(stage)
            # A running snapshot saves the stage as it is before this change.
            self.before_update(stage, self._ledger.num_commits + 1)
            if updates:
                own = self._ownership.own_bytes(stage, params)
                with (
                    self.locks.changing(stage),
                    self._tier.wire(stage, buffer, write=True, part=own, overwrite=overwrite) as image,
                ):
                    yield image
            else:
                yield None
        # Outside of the lock: other ranks may wait for updates of this rank before they reach this place, and
        # these updates need the lock.
        self._propagation.written(stage)
        self._versions[stage] += 1  # last: a rank that sees the new version may fetch at once

    @contextmanager
    def replacing(self, stage: int) -> Iterator[torch.Tensor]:
        """Lock a stage for the context, and yield memory into which the caller writes its new wire image.

        All ranks call this together. Pending updates are discarded, and the stage is no longer torn.
        """
        with self.locks.exclusive(stage):
            # The stage is not torn any more: all of it is replaced, so nothing of a failed update is left.
            self.locks.mend(stage)
            # Otherwise an old update would change the new values.
            self._ledger.forget(stage)
            self._stage_update.forget(stage)
            self._versions[stage] += 1
            resident = self._tier.resident_wire(stage)
            buffer = self._buffer(stage)
            image = resident if buffer is None else buffer
            assert image is not None, "a stage without a buffer is resident"
            self._copies.wait(stage)
            yield image
            if resident is None and self._ownership.updates(stage):
                self._tier.write_wire(stage, image, self._ownership.own_bytes(stage))
            self._propagation.written(stage)

    # commits

    def commit(self, by_stage: Mapping[int, Mapping[int, Part]]) -> None:
        """Record the parts of a commit as the pending updates of their stages."""
        number = self._ledger.num_commits
        for stage, parts in by_stage.items():
            self._queue(stage, parts, number)
        stages = sorted(by_stage)
        # In the order of stages: all hosts must send them in the same order.
        self._propagation.committed(stages, number)
        if self._fabric.num_hosts > 1 or not self._fabric.computes:
            # Other ranks wait for these updates. An error is raised when the stage is used.
            for stage in stages:
                self._ahead.submit(self.catch_up, stage)

    def commit_ahead(self, stage: int, parts: Mapping[int, Part]) -> None:
        """Record parts of the running step's commit as the pending update of a stage, ahead of the commit.

        With several ranks they must be on one host: hosts send updates in the order of their commits.
        """
        self._queue(stage, parts, self._ledger.num_commits + 1)

    def _queue(self, stage: int, parts: Mapping[int, Part], number: int) -> None:
        """Record parts of a commit as the pending update of a stage, or that other ranks will apply them."""
        if self._ownership.updates(stage):
            self._ledger.add(stage, parts, number)
        else:
            self._propagation.skipped(stage, number)
        self._versions[stage] += 1  # last: a thread that sees the new version may fetch at once

    @contextmanager
    def without_updates(self, stages: Iterable[int]) -> Iterator[None]:
        """Enter a context in which no other thread updates these stages. It does nothing with several ranks.

        An update takes all gradients of its stage, and later puts back those that its commit does not update.
        Until then another thread would not find them. The caller is the thread that commits.
        """
        with ExitStack() as held:
            # With several ranks a thread may hold a stage until another rank updates it, which may wait here.
            for stage in stages if self._fabric.size == 1 else ():
                # Stages without an update are left out, because a snapshot may hold them for long. The ledger
                # is read first: an update leaves it only after `changing` has marked the stage.
                if stage in self._ledger or self.locks.is_changing(stage):
                    held.enter_context(self.locks.exclusive(stage))
            yield

    def undo(self) -> Undone:
        """Discard the pending updates of commits that can still be undone; see `Ledger.undo`."""
        undone = self._ledger.undo()
        for stage, number in undone.emptied.items():
            # Under the lock: a thread may still be applying an earlier update of the stage, whose number must
            # be recorded first.
            with self.locks.exclusive(stage):
                self._propagation.updated(stage, number)
        return undone

    def catch_up_all(self) -> None:
        """Apply all pending updates that this rank must make. Other ranks may be waiting for them."""
        for stage in self._ledger.stages:
            self.catch_up(stage)

    def catch_up(self, stage: int) -> None:
        """Apply the pending update that this rank must make of a stage. Does not wait for other ranks."""
        with torch.no_grad(), self.locks.whole(stage):
            # Does nothing if another thread has applied the update since the list was made.
            self._update(stage)

    def _catch_up(self, stage: int, buffer: torch.Tensor | None, up_to: int | None = None) -> bool:
        """Apply the pending update of a stage, and block until all ranks have. The caller holds the stage.

        Args:
            stage: the stage.
            buffer: memory for the wire image; allocated if needed and not given.
            up_to: leave an update for later if it was committed after this number.

        Returns:
            True if `buffer` now has the whole new wire image (only if the image is not resident).
        """
        updated = self._ledger.due(stage, up_to) is not None and self._update(stage, buffer)
        self._propagation.wait(stage, up_to)
        # With several hosts the image lacks the parts that other hosts have updated.
        return updated and self._fabric.num_hosts == 1

    @apart_from_modes()
    def _update(self, stage: int, buffer: torch.Tensor | None = None) -> bool:
        """Apply the pending update of a stage. The caller holds the stage.

        Returns:
            False if no update is pending: it may have been undone since the caller saw it.
        """
        pending = self._ledger.due(stage)
        if pending is None:
            return False
        if buffer is None and self._tier.on_device(stage) is None:
            buffer = self._buffer(stage)
        # A snapshot reads the stage in this call, so the stage must not count as torn yet.
        self.before_update(stage, pending.number)
        if self._fabric.num_hosts > 1:
            self._propagation.wait(stage)  # other hosts may still be receiving the previous update
        self._copies.wait(stage)
        with self.locks.changing(stage):
            # The ledger is told before the change: from here on the commit cannot be undone.
            pending = self._ledger.apply(stage)
            if pending is None:
                return False
            try:
                self._stage_update.apply(stage, pending, buffer)
            except DeviceFullError:
                # The next use of the stage continues the update. It cannot be undone, as after `apply`.
                self._ledger.postpone(stage, pending)
                raise
            # This follows the change: other ranks read the stage as soon as they see the number.
            self._propagation.updated(stage, pending.number)
        return True

    def _wait_for_owners(self, stage: int, up_to: int | None = None) -> None:
        """If this rank updates nothing of a stage, block until the ranks that do have updated it.

        Called without the lock: an owner may wait for a snapshot, which this rank saves under the lock.
        """
        if not self._ownership.updates(stage):
            self._ledger.note_used(self._propagation.wait(stage, up_to))

    def _buffer(self, stage: int) -> torch.Tensor | None:
        """Allocate host memory for a wire image. Return `None` if the tier keeps the image there."""
        if self._tier.resident_wire(stage) is not None:
            return None
        return aligned_empty(self._tier.layouts[stage].wire_bytes)

    def close(self) -> None:
        """End the threads that update and send."""
        # This thread ends first, because it uses the propagation.
        self._ahead.shutdown(wait=True, cancel_futures=True)
        self._propagation.close()
        # This frees memory of the calling thread: the thread that trains also updates stages on the device.
        self._stage_update.close()
