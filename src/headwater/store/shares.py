"""Which rank updates which pieces of a stage, and what of a stage a host keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from headwater.fabric.fabric import Fabric
from headwater.store.layout import Group, Piece, StageLayout


class Shares:
    """Who updates which pieces of a stage: about equally many elements for each owner, in their order.

    Attributes:
        owners: the ranks that update.

    Args:
        layout: of the stage.
        owners: whose equal parts of the elements follow each other; a rank may have several.
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
            middle = before + (piece.stop - piece.start) // 2
            before += piece.stop - piece.start
            self._owner[piece.param, piece.start] = owners[
                min(middle * len(owners) // total, len(owners) - 1)
            ]

    def pieces(self) -> list[Piece]:
        """All pieces of the stage, in order."""
        return [piece for group in self._layout.groups for piece in group.pieces]

    def owner(self, piece: Piece) -> int:
        """The rank that updates a piece."""
        return self._owner[piece.param, piece.start]

    def first_owner(self, param: int) -> int:
        """The rank that updates the first piece of a parameter."""
        return self._owner[param, 0]

    def host(self, piece: Piece) -> int:
        """The host that updates a piece, and keeps what there is of it beside the weights."""
        return self._hosts[self.owner(piece)]

    def groups_of_host(self, host: int, params: Collection[int] | None = None) -> list[Group]:
        """The groups with pieces that a host updates; only of these parameters, if any are named."""
        return self._groups(lambda piece: self.host(piece) == host, params)

    def groups_of_rank(self, rank: int, params: Collection[int] | None = None) -> list[Group]:
        """The same of a rank."""
        return self._groups(lambda piece: self.owner(piece) == rank, params)

    def _groups(self, wanted: Callable[[Piece], bool], params: Collection[int] | None) -> list[Group]:
        return [
            group
            for group in self._layout.groups
            if any(wanted(piece) and (params is None or piece.param in params) for piece in group.pieces)
        ]

    def wire_ranges(self) -> list[slice]:
        """The bytes of the wire image that each host updates; they follow each other."""
        stage = self._layout.stage
        ends = [0] * (self._hosts[-1] + 1)
        for piece in self.pieces():
            end = stage.offsets[piece.param] + piece.stop * stage.params[piece.param].wire_dtype.itemsize
            ends[self.host(piece)] = max(ends[self.host(piece)], end)
        starts = [max(ends[:host], default=0) for host in range(len(ends))]
        return [slice(start, max(start, end)) for start, end in zip(starts, ends, strict=True)]


def shares_of(layouts: Sequence[StageLayout], fabric: Fabric, *, on_disk: bool) -> list[Shares]:
    """Who updates each stage.

    On a disk one rank of a host updates all that the host has of a stage, so that nobody else writes in the
    stage's file: the first rank, which fills slabs; of store ranks one after the other.
    """
    owners, hosts = fabric.placement.owners, fabric.hosts

    def updating(rank: int, stage: int) -> int:
        there = [other for other in owners if hosts[other] == hosts[rank]]
        return there[stage % len(there) if fabric.placement.num_memx else 0]

    return [
        Shares(layout, [updating(rank, stage) if on_disk else rank for rank in owners], hosts)
        for stage, layout in enumerate(layouts)
    ]
