"""The thread that copies stages from the weight store to slabs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, final

import torch

from headwater.core.buffers import aligned_empty
from headwater.core.recorder import FETCH, RECORDER
from headwater.core.stage import StageSpec
from headwater.core.streams import REACHED, Event
from headwater.core.worker_pools import update_pool
from headwater.stream.device import Device
from headwater.stream.slabs import SlabDirectory, SlabPool, Want, reason

if TYPE_CHECKING:
    from headwater.store.store import WeightStore
    from headwater.store.tier import Tier


@final
class SlabLoader:
    """Copies stages to slabs on a thread, one after another, and records them in the slab directory.

    Args:
        store: the weight store.
        stages: the stages.
        pool: the slabs.
        directory: receives the number of each loaded slab, or the reason of a failure.
        device: the device of the slabs.
    """

    def __init__(
        self,
        store: WeightStore,
        stages: Sequence[StageSpec],
        pool: SlabPool,
        directory: SlabDirectory,
        device: Device,
    ) -> None:
        self._store = store
        self._stages = stages
        self._pool = pool
        self._directory = directory
        self._device = device
        read = [stage.slab_bytes for stage in stages if _is_read_from_disk(store.tier, stage.index)]
        self._staging = aligned_empty(max(read)) if read and not device.reads_host else None
        self._unlock = device.page_lock([] if self._staging is None else [self._staging])
        self._stream = device.new_stream()
        self._last_copy: Event = REACHED
        # This thread updates stages too.
        self._thread = update_pool("headwater-fetch", on_cpu=device.reads_host)
        self._thread.submit(device.enter_thread)

    def start(self, index: int, want: Want) -> Future[Event]:
        """Start to copy a stage to slab number `index`, with all updates that are committed now.

        The copy begins after the work that the compute thread has queued on the device, which may still read
        the slab.

        Returns:
            A future that is done when the copy to the slab is queued. The event that it returns is reached
            when the stage is in the slab.

        Raises:
            StreamError: in a fork of the process, which lacks the thread.
        """
        self._thread.check_process()  # before the device is used, which a fork cannot
        # The number is read here, on the compute thread: later commits must not be applied by this load.
        up_to = self._store.ledger.num_commits
        return self._thread.submit(self._load, index, want, up_to, self._device.compute.record())

    def await_on_device(self, ready: Future[Event]) -> None:
        """Make the computation wait for a copy that `start` has started. Raise if the fetch failed.

        The calling thread blocks only until the copy is queued.
        """
        self._device.compute.wait(ready.result())

    # The thread gets an index, because it keeps its last arguments, and a view would keep the slab in use.
    def _load(self, index: int, want: Want, up_to: int, computed: Event) -> Event:
        """Copy a stage to slab number `index`, with the updates of commits up to number `up_to`.

        Later commits are not applied, so that they can still be rolled back. The copy begins after
        `computed`. Returns the event of the copy, so that this thread can update the next stage meanwhile.
        """
        stage, buffer = want.stage, self._pool.slabs[index].buffer
        spec = self._stages[stage]
        try:
            with RECORDER.span(FETCH, spec.name, spec.slab_bytes), torch.no_grad():
                self._stream.wait(computed)
                if self._staging is None or self._store.tier.resident_wire(stage) is not None:
                    self._store.fetch(stage, buffer, up_to, self._stream)
                else:
                    # The copy before this one may still read the staging buffer.
                    self._last_copy.synchronize()
                    self._store.fetch(stage, self._staging, up_to)
                    self._stream.copy(buffer, self._staging[: buffer.numel()])
                self._last_copy = self._stream.record()
        except Exception as error:
            # Other ranks wait for the stage, and raise this text.
            self._directory.fail(f"stage {spec.name!r} cannot be read: {reason(error)}")
            raise
        # This is last: other ranks read the slab as soon as they find the stage. Ranks share slabs only in
        # host memory, where the copy is complete here.
        self._directory.publish(index, want)
        return self._last_copy

    def close(self) -> None:
        """End the thread. Copies that have not begun are dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        # No thread queues copies any more. The slabs and the staging buffer are freed next.
        self._last_copy.synchronize()
        self._unlock()


def _is_read_from_disk(tier: Tier, stage: int) -> bool:
    return tier.resident_wire(stage) is None and tier.on_device(stage) is None
