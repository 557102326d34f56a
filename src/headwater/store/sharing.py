"""When all ranks have updated their shares of a stage, and how every host gets the weights of the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from headwater.core.buffers import aligned_empty
from headwater.fabric.fabric import Board, Fabric
from headwater.store.layout import Group, Piece, StageLayout
from headwater.store.shares import shares_of
from headwater.store.tier import Tier


class Sharing:
    """The ranks that share a store. All of them commit, and write whole stages, in the same order.

    Within a host all see each other's updates at once. Between hosts the leaders send what their host has
    updated, stage after stage in the order of the commit, on a thread of their own.

    Attributes:
        host: number of this rank's host.

    Args:
        fabric: the ranks.
        layouts: of the stages.
        tier: where their wire images lie.
    """

    def __init__(self, fabric: Fabric, layouts: Sequence[StageLayout], tier: Tier) -> None:
        self.host = fabric.host
        self._fabric = fabric
        self._layouts = layouts
        self._stages = [layout.stage for layout in layouts]
        self._shares = shares_of(layouts, fabric, on_disk=not tier.is_shared)
        self._updated = Board(fabric, len(layouts) * fabric.local_size)  # the last commit, by stage and rank
        self._numbers = [0] * len(layouts)  # the last commit that this rank has done its share of
        self._spread = Board(fabric, len(layouts))  # the last commit that has come from all hosts
        self._ranges = [shares.wire_ranges() for shares in self._shares]
        self._tier = tier
        self._link = fabric.connect("weights")
        self._buffer: torch.Tensor | None = None  # for a wire image on its way between disk and other hosts
        self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headwater-broadcast")
        self._failure: BaseException | None = None  # of what is sent

    def is_mine(self, stage: int, piece: Piece) -> bool:
        """Whether this rank updates a piece."""
        return self._shares[stage].owner(piece) == self._fabric.rank

    def is_first_of_mine(self, stage: int, param: int) -> bool:
        """Whether this rank updates the first piece of a parameter."""
        return self._shares[stage].first_owner(param) == self._fabric.rank

    def updates(self, stage: int) -> bool:
        """Whether this rank updates anything of a stage."""
        return self._fabric.rank in self._shares[stage].owners

    def own_groups(self, stage: int, params: Collection[int] | None = None) -> list[Group]:
        """The groups with pieces that this rank updates; only of these parameters, if any are named."""
        return self._shares[stage].groups_of_rank(self._fabric.rank, params)

    def host_groups(self, stage: int, params: Collection[int] | None = None) -> list[Group]:
        """The groups with pieces that this host updates; only of these parameters, if any are named."""
        return self._shares[stage].groups_of_host(self._fabric.host, params)

    def own_bytes(self, stage: int) -> slice:
        """The bytes of the wire image that this host updates."""
        return self._ranges[stage][self._fabric.host]

    def is_here(self, stage: int, piece: Piece) -> bool:
        """Whether this host updates a piece."""
        return self.host_of(stage, piece) == self._fabric.host

    def host_of(self, stage: int, piece: Piece) -> int:
        """The host that updates a piece."""
        return self._shares[stage].host(piece)

    def host_run(self, stage: int, param: int, host: int) -> range:
        """The elements of a parameter that a host updates."""
        own = [p for p in self._shares[stage].pieces() if p.param == param and self.host_of(stage, p) == host]
        return range(own[0].start, own[-1].stop) if own else range(0)

    # updates

    def committed(self, stages: Iterable[int], number: int) -> None:
        """Say which stages a commit updates, so that they are sent in this order."""
        for stage in stages if self._link is not None else ():
            self._thread.submit(self._send_updated, stage, number).add_done_callback(self._note_failure)

    def _note_failure(self, sent: Future[None]) -> None:
        if not sent.cancelled():
            self._failure = self._failure or sent.exception()

    def leave(self, stage: int, number: int) -> None:
        """Say that this rank has no share of an update of a stage; `wait` waits for the others."""
        self._numbers[stage] = number

    def updated(self, stage: int, number: int) -> None:
        """Say that this rank has done its share of the update of a stage, or that it is undone."""
        self._updated.post(stage * self._fabric.local_size + self._fabric.local_rank, number)
        self._numbers[stage] = number

    def wait(self, stage: int, up_to: int | None = None) -> int:
        """Return when everybody has done the share of the update that this rank has done, or left, last.

        Where that is of a commit after `up_to`, at once: those before it were waited for.

        Returns:
            The commit that was waited for; 0 if none was.
        """
        number = self._numbers[stage]
        if up_to is not None and number > up_to:
            return 0
        if self._fabric.num_hosts == 1:
            self._wait_for_host(stage, number)
        else:
            what = f"stage {self._stages[stage].name!r} of all hosts"
            self._fabric.wait_until(lambda: self._has_come(stage, number), what)
        return number

    def _has_come(self, stage: int, number: int) -> bool:
        """Whether this update of a stage has come from all hosts; raises what has gone wrong with that."""
        has_come = self._spread.read(stage) >= number
        if not has_come and self._failure is not None:
            raise self._failure
        return has_come

    def _wait_for_host(self, stage: int, number: int) -> None:
        """Return when all of this host that update a stage have done so."""
        first, size = self._fabric.rank - self._fabric.local_rank, self._fabric.local_size
        for rank in range(first, first + size):
            if rank in self._shares[stage].owners:
                slot, name = stage * size + rank - first, self._stages[stage].name
                self._fabric.wait_until(
                    lambda slot=slot: self._closing or self._updated.read(slot) >= number,  # type: ignore[misc]
                    f"rank {rank} to update stage {name!r}",
                )

    def _send_updated(self, stage: int, number: int) -> None:
        self._wait_for_host(stage, number)
        if self._closing:  # there may be updates that will never come
            return
        self._send(stage)
        self._spread.post(stage, number)

    def _send(self, stage: int) -> None:
        """Send what this host has updated of a stage, and put what others have where it belongs."""
        assert self._link is not None, "leaders send"
        image = self._tier.resident_wire(stage)
        if image is not None:
            self._exchange(stage, image)
            return
        if self._buffer is None:
            self._buffer = aligned_empty(max(layout.wire_bytes for layout in self._layouts))
        self._tier.read_wire(stage, self._buffer, self.own_bytes(stage))
        self._exchange(stage, self._buffer)
        for host, part in enumerate(self._ranges[stage]):
            if host != self._fabric.host:
                self._tier.write_wire(stage, self._buffer, part)

    def _exchange(self, stage: int, image: torch.Tensor) -> None:
        assert self._link is not None, "leaders send"
        parts = [image[part] for part in self._ranges[stage]]
        self._link.exchange([parts[self._fabric.host]] * len(parts), parts)

    def written(self, stage: int) -> None:
        """Say that this rank has written its pieces of a stage anew; returns when the stage is whole."""
        what = f"stage {self._stages[stage].name!r} to be written"
        self._fabric.neighbours.barrier(what)
        if self._link is not None:
            self._thread.submit(self._send, stage).result()
        if self._fabric.num_hosts > 1:
            self._fabric.neighbours.barrier(what)

    def close(self) -> None:
        """Give back the thread."""
        self._closing = True
        self._thread.shutdown(wait=True, cancel_futures=True)
