"""Which rank updates which pieces of a stage, and when all of them have, on every host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from headwater.fabric.fabric import Board, Fabric
from headwater.store.layout import Piece, StageLayout
from headwater.store.tier import Tier


class Shares:
    """Who updates which pieces of a stage: about equally many elements for each owner, in their order.

    Args:
        layout: of the stage.
        owners: the ranks that update.
    """

    def __init__(self, layout: StageLayout, owners: range) -> None:
        total = max(sum(param.numel for param in layout.stage.params), 1)
        self._owners: dict[tuple[int, int], int] = {}
        before = 0
        for group in layout.groups:
            for piece in group.pieces:
                middle = before + (piece.stop - piece.start) // 2
                before += piece.stop - piece.start
                self._owners[piece.param, piece.start] = owners[
                    min(middle * len(owners) // total, len(owners) - 1)
                ]

    def owner(self, piece: Piece) -> int:
        """The rank that updates a piece."""
        return self._owners[piece.param, piece.start]

    def first_owner(self, param: int) -> int:
        """The rank that updates the first piece of a parameter."""
        return self._owners[param, 0]


class Sharing:
    """The ranks that share a store. All of them commit, and write whole stages, in the same order.

    Within a host all see each other's updates at once. Between hosts the leaders send what their host has
    updated, stage after stage in the order of the commit, on a thread of their own.

    Attributes:
        updates_here: whether this rank updates anything.

    Args:
        fabric: the ranks.
        layouts: of the stages.
        tier: where their wire images lie, if there are several ranks.
    """

    def __init__(self, fabric: Fabric, layouts: Sequence[StageLayout], tier: Tier) -> None:
        self._fabric = fabric
        self._layouts = layouts
        self._stages = [layout.stage for layout in layouts]
        owners = fabric.placement.owners if tier.is_shared else range(1)
        first = fabric.rank - fabric.local_rank
        self._neighbours = [r for r in range(first, first + fabric.local_size) if r in owners]
        self.updates_here = fabric.rank in owners
        self._shares = [Shares(layout, owners) for layout in layouts]
        self._updated = Board(fabric, len(layouts) * fabric.local_size)  # the last commit, by stage and rank
        self._numbers = [0] * len(layouts)  # the last commit that this rank has done its share of
        self._spread = Board(fabric, len(layouts))  # the last commit that has come from all hosts
        self._ranges = [
            _host_ranges(layout, shares, fabric) for layout, shares in zip(layouts, self._shares, strict=True)
        ]
        self._tier = tier
        self._link = fabric.connect("weights")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headwater-broadcast")
        self._sending: list[Future[None]] = []

    def is_mine(self, stage: int, piece: Piece) -> bool:
        """Whether this rank updates a piece."""
        return self._shares[stage].owner(piece) == self._fabric.rank

    def is_first_of_mine(self, stage: int, param: int) -> bool:
        """Whether this rank updates the first piece of a parameter."""
        return self._shares[stage].first_owner(param) == self._fabric.rank

    def host_of(self, stage: int, piece: Piece) -> int:
        """The host that updates a piece."""
        return self._fabric.hosts[self._shares[stage].owner(piece)]

    def host_run(self, stage: int, param: int, host: int) -> range:
        """The elements of a parameter that a host updates."""
        pieces = [piece for group in self._layouts[stage].groups for piece in group.pieces]
        own = [p for p in pieces if p.param == param and self.host_of(stage, p) == host]
        return range(own[0].start, own[-1].stop) if own else range(0)

    # updates

    def committed(self, stages: Iterable[int], number: int) -> None:
        """Say which stages a commit updates, so that they are sent in this order."""
        self._check_sent()
        if self._link is not None:
            self._sending += [self._thread.submit(self._send_updated, stage, number) for stage in stages]

    def leave(self, stage: int, number: int) -> None:
        """Say that this rank has no share of an update of a stage; `wait` waits for the others."""
        self._numbers[stage] = number

    def updated(self, stage: int, number: int) -> None:
        """Say that this rank has done its share of the update of a stage."""
        self._updated.post(stage * self._fabric.local_size + self._fabric.local_rank, number)
        self._numbers[stage] = number

    def wait(self, stage: int, up_to: int | None = None) -> None:
        """Return when everybody has done the share of the update that this rank has done, or left, last.

        Where that is of a commit after `up_to`, at once: those before it were waited for.
        """
        number = self._numbers[stage]
        if up_to is not None and number > up_to:
            return
        if self._fabric.num_hosts == 1:
            self._wait_for_host(stage, number)
        elif self._spread.read(stage) < number:
            self._check_sent()
            self._spread.wait(stage, number, f"stage {self._stages[stage].name!r} of all hosts")

    def _wait_for_host(self, stage: int, number: int) -> None:
        first = self._fabric.rank - self._fabric.local_rank
        for rank in self._neighbours:
            what = f"rank {rank} to update stage {self._stages[stage].name!r}"
            self._updated.wait(stage * self._fabric.local_size + rank - first, number, what)

    def _send_updated(self, stage: int, number: int) -> None:
        self._wait_for_host(stage, number)
        self._send(stage)
        self._spread.post(stage, number)

    def _send(self, stage: int) -> None:
        assert self._link is not None, "leaders send"
        image = self._tier.resident_wire(stage)
        assert image is not None, "ranks share weights in memory"
        parts = [image[part] for part in self._ranges[stage]]
        self._link.exchange([parts[self._fabric.host]] * len(parts), parts)

    def _check_sent(self) -> None:
        """Raise what has gone wrong while sending."""
        while self._sending and self._sending[0].done():
            self._sending.pop(0).result()

    def written(self, stage: int) -> None:
        """Say that this rank has written its pieces of a stage anew; returns when the stage is whole."""
        what = f"stage {self._stages[stage].name!r} to be written"
        self._fabric.barrier(what)
        if self._link is not None:
            self._thread.submit(self._send, stage).result()
        if self._fabric.num_hosts > 1:
            self._fabric.barrier(what)

    def close(self) -> None:
        """Give back the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _host_ranges(layout: StageLayout, shares: Shares, fabric: Fabric) -> list[slice]:
    """The bytes of the wire image that each host updates; they follow each other."""
    stage, ends = layout.stage, [0] * fabric.num_hosts
    for group in layout.groups:
        for piece in group.pieces:
            end = stage.offsets[piece.param] + piece.stop * stage.params[piece.param].wire_dtype.itemsize
            host = fabric.hosts[shares.owner(piece)]
            ends[host] = max(ends[host], end)
    starts = [max(ends[:host], default=0) for host in range(fabric.num_hosts)]
    return [slice(start, max(start, end)) for start, end in zip(starts, ends, strict=True)]
