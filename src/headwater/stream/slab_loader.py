"""The thread that copies stages from the weight store to slabs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, final

import torch

from headwater.core.buffers import aligned_empty
from headwater.core.errors import HeadwaterError
from headwater.core.recorder import FETCH, RECORDER
from headwater.core.stage import StageSpec
from headwater.core.threads import single_core_pool
from headwater.stream.device import Device
from headwater.stream.slabs import SlabDirectory, SlabPool, Want

if TYPE_CHECKING:
    from headwater.store.store import WeightStore


@final
class SlabLoader:
    """Copies stages to slabs on a thread, one after another, and records them in the slab directory.

    Args:
        store: the weight store.
        stages: the stages.
        pool: the slabs.
        directory: where a loaded slab is published, or the failure.
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
        read = [stage.slab_bytes for stage in stages if store.tier.resident_wire(stage.index) is None]
        self._staging = aligned_empty(max(read)) if read and not device.reads_host else None
        self._unlock = device.page_lock([] if self._staging is None else [self._staging])
        # Updates run on this thread too: on one core beside a model on the CPU, else on all cores.
        make_pool = single_core_pool if device.reads_host else ThreadPoolExecutor
        self._thread = make_pool(1, "headwater-fetch")

    def start(self, index: int, want: Want) -> Future[None]:
        """Start to copy a stage to slab number `index`, with all updates that are committed now.

        The copy begins after the work that the compute thread has queued on the device, which may still read
        the slab.

        Returns:
            Done when the stage is in the slab.
        """
        # Read by the compute thread: commits that come while the load waits must not be applied.
        up_to = self._store.ledger.num_commits
        return self._thread.submit(self._load, index, want, up_to, self._device.compute_mark())

    # The slab is an index: the thread keeps its last arguments, and a view of a slab would make it in use.
    def _load(self, index: int, want: Want, up_to: int, mark: object) -> None:
        """Copy a stage to slab number `index`, with the updates of commits up to number `up_to`.

        Later commits are not applied, so that they can still be rolled back.
        """
        stage, buffer = want.stage, self._pool.slabs[index].buffer
        spec = self._stages[stage]
        try:
            with (
                RECORDER.span(FETCH, spec.name, spec.slab_bytes),
                torch.no_grad(),
                self._device.copying(mark),
            ):
                if self._staging is None or self._store.tier.resident_wire(stage) is not None:
                    self._store.fetch(stage, buffer, up_to)
                else:
                    self._store.fetch(stage, self._staging, up_to)
                    buffer.copy_(self._staging[: buffer.numel()], non_blocking=True)
        except HeadwaterError as error:
            # Other ranks wait for the stage, and raise this text.
            self._directory.fail(f"stage {spec.name!r} cannot be read: {error.what}")
            raise
        # After the copy: other ranks read the slab as soon as they find the stage.
        self._directory.publish(index, want)

    def close(self) -> None:
        """End the thread. Copies that have not begun are dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        # The thread has ended, so no copy reads the staging buffer.
        self._unlock()
