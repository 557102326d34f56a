"""Propagation of updates: ranks wait for each other's updates, and hosts send updated weights."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import final

import torch

from headwater.core.buffers import aligned_empty
from headwater.core.worker_pools import WorkerPool
from headwater.fabric.fabric import Board, Fabric
from headwater.store.ownership import Ownership
from headwater.store.tier import Tier


@final
class Propagation:
    """Brings each rank's updates to all ranks. All ranks commit, and replace stages, in the same order.

    Ranks of a host see each other's updates at once, in memory or files that they share. Between hosts the
    leaders send what their host has updated, stage after stage in the order of the commits. They do this on
    a thread during the computation.

    Args:
        fabric: the ranks.
        ownership: which rank updates which pieces.
        tier: where the wire images lie.
    """

    def __init__(self, fabric: Fabric, ownership: Ownership, tier: Tier) -> None:
        self._fabric = fabric
        self._is_single = fabric.size == 1
        self._ownership = ownership
        self._tier = tier
        count = len(tier.layouts)
        self._updated = Board(fabric, count * fabric.local_size)  # by stage and rank, the last commit applied
        self._last = [0] * count  # by stage, the last commit that this rank has applied, or that others apply
        self._spread = Board(fabric, count)  # by stage, the last commit that has come from all hosts
        self._link = fabric.connect("weights")
        self._buffer: torch.Tensor | None = None  # for a wire image on its way between disk and other hosts
        self._closing = False
        self._sender = WorkerPool(1, "headwater-broadcast")
        self._failure: BaseException | None = None  # the error of the sending thread

    def committed(self, stages: Iterable[int], number: int) -> None:
        """Queue the stages that a commit updates for sending. All hosts send them in this order."""
        for stage in stages if self._link is not None else ():
            self._sender.submit(self._send_updated, stage, number).add_done_callback(self._note_failure)

    def _note_failure(self, sent: Future[None]) -> None:
        if not sent.cancelled():
            self._failure = self._failure or sent.exception()

    def skipped(self, stage: int, number: int) -> None:
        """Record a commit's update of a stage that only other ranks apply. `wait` will wait for them."""
        self._last[stage] = number

    def updated(self, stage: int, number: int) -> None:
        """Record that this rank has applied (or undone) its pieces of commit `number` in a stage."""
        if not self._is_single:
            self._updated.post(stage * self._fabric.local_size + self._fabric.local_rank, number)
        self._last[stage] = number

    def wait(self, stage: int, up_to: int | None = None) -> int:
        """Block until all ranks have applied the newest update of a stage that this rank knows of.

        The newest update is the last one that this rank has passed to `updated` or `skipped`. If it was
        committed after number `up_to`, return at once: this rank has waited for older updates before.

        Returns:
            The commit that was waited for, or 0.
        """
        number = self._last[stage]
        if up_to is not None and number > up_to:
            return 0
        if self._is_single:  # a single rank has applied all of its commits
            return number
        if self._fabric.num_hosts == 1:
            self._wait_for_host(stage, number)
        else:
            self._fabric.wait_until(
                lambda: self._has_come(stage, number), f"stage {self._name(stage)!r} of all hosts"
            )
        return number

    def _has_come(self, stage: int, number: int) -> bool:
        """True if all hosts have sent commit `number` of a stage. Raises an error of the sending thread."""
        has_come = self._spread.read(stage) >= number
        if not has_come and self._failure is not None:
            raise self._failure
        return has_come

    def _wait_for_host(self, stage: int, number: int) -> None:
        """Block until all ranks of this host have applied commit `number` to their pieces of a stage."""
        first, size = self._fabric.rank - self._fabric.local_rank, self._fabric.local_size
        for rank in range(first, first + size):
            if rank in self._ownership.owners(stage):
                slot = stage * size + rank - first
                self._fabric.wait_until(
                    lambda slot=slot: self._closing or self._updated.read(slot) >= number,  # type: ignore[misc]
                    f"rank {rank} to update stage {self._name(stage)!r}",
                )

    def _send_updated(self, stage: int, number: int) -> None:
        # A host sends a stage only when all its ranks have updated their parts.
        self._wait_for_host(stage, number)
        if self._closing:  # the wait may have ended without the updates
            return
        self._send(stage)
        # The tier has all parts now: other ranks of the host read them as soon as they see the number.
        self._spread.post(stage, number)

    def _send(self, stage: int) -> None:
        """Send the weights of a stage that this host has updated. Store those that other hosts send."""
        assert self._link is not None, "leaders send"
        image = self._tier.resident_wire(stage)
        if image is not None:
            self._exchange(stage, image)
            return
        if self._buffer is None:
            self._buffer = aligned_empty(max(layout.wire_bytes for layout in self._tier.layouts))
        self._tier.read_wire(stage, self._buffer, self._ownership.own_bytes(stage))
        self._exchange(stage, self._buffer)
        for host, part in enumerate(self._ownership.wire_ranges(stage)):
            if host != self._fabric.host:
                self._tier.write_wire(stage, self._buffer, part)

    def _exchange(self, stage: int, image: torch.Tensor) -> None:
        assert self._link is not None, "leaders send"
        parts = [image[part] for part in self._ownership.wire_ranges(stage)]
        self._link.exchange([parts[self._fabric.host]] * len(parts), parts)

    def written(self, stage: int) -> None:
        """Record that this rank has replaced its pieces of a stage. Block until all ranks have done so."""
        what = f"stage {self._name(stage)!r} to be written"
        self._fabric.neighbours.barrier(what)
        if self._link is not None:
            # The thread that sends updates does this too: the order of sends must be equal on all hosts.
            self._sender.submit(self._send, stage).result()
        # The leader has received what other hosts have written.
        if self._fabric.num_hosts > 1:
            self._fabric.neighbours.barrier(what)

    def _name(self, stage: int) -> str:
        return self._tier.layouts[stage].stage.name

    def close(self) -> None:
        """End the sending thread. Threads that wait for other ranks stop waiting."""
        self._closing = True  # before the shutdown, which waits for a send that waits for other ranks
        self._sender.shutdown(wait=True, cancel_futures=True)
        if self._link is not None:
            self._link.close()
