"""Ownership: which rank updates which pieces of each stage, and which pieces a host keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import final

from headwater.core.placement import Placement
from headwater.store.layout import Group, Piece, StageLayout


@final
class StageOwnership:
    """Divides the pieces of a stage among ranks, so that each updates about equally many elements.

    Attributes:
        owners: the ranks that update pieces of the stage.

    Args:
        layout: the layout of the stage.
        owners: the ranks, in the order of their equal parts of the elements; a rank may occur several times.
        hosts: the host of each rank.
    """

    def __init__(self, layout: StageLayout, owners: Sequence[int], hosts: Sequence[int]) -> None:
        self.owners = frozenset(owners)
        self._layout = layout
        self._hosts = hosts
        self._owner: dict[tuple[int, int], int] = {}
        total = max(sum(param.numel for param in layout.stage.params), 1)
        before = 0
        for piece in self.pieces():
            # The middle decides: a piece that crosses a border goes to the rank with most of it.
            middle = before + (piece.stop - piece.start) // 2
            before += piece.stop - piece.start
            part = min(middle * len(owners) // total, len(owners) - 1)
            self._owner[piece.param, piece.start] = owners[part]

    def pieces(self) -> list[Piece]:
        """Return all pieces of the stage, in order."""
        return [piece for group in self._layout.groups for piece in group.pieces]

    def owner(self, piece: Piece) -> int:
        """Return the rank that updates a piece."""
        return self._owner[piece.param, piece.start]

    def first_owner(self, param: int) -> int:
        """Return the rank that updates the first piece of a parameter."""
        return self._owner[param, 0]

    def host(self, piece: Piece) -> int:
        """Return the host that updates a piece. That host keeps the piece's bytes beside the wire image."""
        return self._hosts[self.owner(piece)]

    def groups(self, wanted: Callable[[Piece], bool], params: Collection[int] | None) -> list[Group]:
        """Return groups of the pieces for which `wanted` is true, and of no others.

        If `params` is given, only pieces of these parameters are in the groups.
        """
        found = []
        for group in self._layout.groups:
            of_params = [piece for piece in group.pieces if params is None or piece.param in params]
            pieces = tuple(piece for piece in of_params if wanted(piece))
            if pieces:
                found.append(dataclasses.replace(group, pieces=pieces))
        return found

    def wire_ranges(self) -> list[slice]:
        """Return, for each host, the slice of the wire image that it updates. The slices do not overlap."""
        stage = self._layout.stage
        ends = [0] * (self._hosts[-1] + 1)
        for piece in self.pieces():
            spec = stage.params[piece.param]
            # The kept elements of a masked parameter may lie anywhere in it; only one rank has such pieces.
            stop = spec.numel if piece.is_compact else piece.stop
            end = stage.offsets[piece.param] + stop * spec.wire_dtype.itemsize
            # Owners are in the order of ranks, so the pieces of a host are contiguous.
            ends[self.host(piece)] = max(ends[self.host(piece)], end)
        starts = [max(ends[:host], default=0) for host in range(len(ends))]
        return [slice(start, max(start, end)) for start, end in zip(starts, ends, strict=True)]


@final
class Ownership:
    """Ownership of the pieces of all stages, from the point of view of one rank.

    Every rank updates a part of a stage in memory. A single rank of a host updates all that the host has of a
    stage on disk, so that no other process writes in the stage's file. Without store ranks this is the first
    rank of the host, which also fills slabs. With store ranks, the stages are given to these ranks in turn. A
    replicated stage is in the device memory of every rank, and each rank updates all of its replica; see
    [Note: replicas] in `store/device.py`.

    Attributes:
        layouts: the layouts of the stages.
        rank: this rank.
        host: the host of this rank.
        replicated: the stages that have a replica on every rank.

    Args:
        layouts: the layouts of the stages.
        rank: this rank.
        placement: which ranks update.
        hosts: the host of each rank.
        on_disk: indices of the stages that are in files.
        replicated: indices of the stages that have a replica on every rank; only with one host, whose ranks
            all compute.
    """

    def __init__(
        self,
        layouts: Sequence[StageLayout],
        rank: int,
        placement: Placement,
        hosts: Sequence[int],
        *,
        on_disk: Collection[int],
        replicated: Collection[int] = (),
    ) -> None:
        assert not replicated or (hosts[-1] == 0 and not placement.num_memx), "replicas: one host, no memx"
        self.layouts = layouts
        self.rank = rank
        self.host = hosts[rank]
        self.replicated = frozenset(replicated)

        def updating(owner: int, stage: int) -> int:
            there = [other for other in placement.owners if hosts[other] == hosts[owner]]
            return there[stage % len(there) if placement.num_memx else 0]

        self._stages = [
            StageOwnership(
                layout,
                [updating(owner, stage) if stage in on_disk else owner for owner in placement.owners],
                hosts,
            )
            for stage, layout in enumerate(layouts)
        ]
        self._wire_ranges = [stage.wire_ranges() for stage in self._stages]
        # Computed once, because every update needs it.
        self._own_groups = [self._groups_of_mine(stage, None) for stage in range(len(layouts))]

    def owners(self, stage: int) -> frozenset[int]:
        """Return the ranks that update pieces of a stage."""
        return self._stages[stage].owners

    def updates(self, stage: int) -> bool:
        """True if this rank updates a piece of a stage."""
        return self.rank in self._stages[stage].owners

    def is_mine(self, stage: int, piece: Piece) -> bool:
        """True if this rank updates a piece."""
        return stage in self.replicated or self._stages[stage].owner(piece) == self.rank

    def is_first_of_mine(self, stage: int, param: int) -> bool:
        """True if this rank updates the first piece of a parameter."""
        return self._stages[stage].first_owner(param) == self.rank

    def is_here(self, stage: int, piece: Piece) -> bool:
        """True if a rank of this host updates a piece."""
        return self._stages[stage].host(piece) == self.host

    def own_groups(self, stage: int, params: Collection[int] | None = None) -> list[Group]:
        """Return groups of only the pieces that this rank updates; with `params`, of these parameters."""
        if params is None:
            return self._own_groups[stage]
        return self._groups_of_mine(stage, params)

    def _groups_of_mine(self, stage: int, params: Collection[int] | None) -> list[Group]:
        return self._stages[stage].groups(lambda piece: self.is_mine(stage, piece), params)

    def host_groups(self, stage: int, params: Collection[int] | None = None) -> list[Group]:
        """Return groups of only the pieces that this host updates; with `params`, of these parameters."""
        return self._stages[stage].groups(lambda piece: self.is_here(stage, piece), params)

    def own_bytes(self, stage: int, params: Collection[int] | None = None) -> slice:
        """Return the slice of the wire image that this host updates; with `params`, its part with these."""
        own = self._wire_ranges[stage][self.host]
        if params is None:
            return own
        spec = self.layouts[stage].stage
        start = min((spec.offsets[param] for param in params), default=own.stop)
        stop = max((spec.offsets[param] + spec.params[param].wire_bytes for param in params), default=0)
        start = max(start, own.start)
        return slice(start, max(start, min(stop, own.stop)))

    def wire_ranges(self, stage: int) -> list[slice]:
        """Return, for each host, the slice of the wire image that it updates."""
        return self._wire_ranges[stage]

    def host_run(self, stage: int, param: int, host: int) -> range:
        """Return the range of elements of a parameter that a host updates."""
        there = self._stages[stage]
        own = [piece for piece in there.pieces() if piece.param == param and there.host(piece) == host]
        return range(own[0].start, own[-1].stop) if own else range(0)

    def elsewhere(self, stage: int) -> list[tuple[int, Piece]]:
        """Return (host, piece) for every piece of a stage that another host updates."""
        there = self._stages[stage]
        pieces = [(there.host(piece), piece) for piece in there.pieces()]
        return [(host, piece) for host, piece in pieces if host != self.host]
