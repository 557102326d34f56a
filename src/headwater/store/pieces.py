"""Reading and writing of the pieces of a stage, for checkpoints and other users of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from headwater.core.stage import ParamSpec, StageSpec
from headwater.core.threads import one_core
from headwater.sparsity.masks import PackedMask
from headwater.store.kept import CommonValues, KeptElements, Run, StoredMasks, ranges, runs
from headwater.store.layout import MASTER_FIELDS, Encoding, Piece, StateLayout, arranged_state
from headwater.store.masters import Workspaces, read_master, write_master
from headwater.store.ownership import Ownership
from headwater.store.rules import UpdateRules
from headwater.store.tier import Pages, Tier, all_pages, no_pages


@dataclasses.dataclass
class PieceState:
    """The values of one piece, or of a run of a masked parameter: master, and optimizer state tensors.

    Masked elements are zeros here; when values are stored, those of masked elements are dropped.

    Attributes:
        param: index of the parameter in its stage.
        start: first element.
        master: values in the parameter's dtype, 1-D.
        states: optimizer state tensors by name, in the optimizer's dtype.
    """

    param: int
    start: int
    master: torch.Tensor
    states: dict[str, torch.Tensor]


def _row_major(
    spec: ParamSpec, master: torch.Tensor, states: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return row-major copies, as files hold them, of a parameter that is not row-major in memory."""
    rows = _copied(spec.arranged(master)).view(-1)
    return rows, {name: _copied(arranged_state(spec, state)) for name, state in states.items()}


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a row-major copy. `contiguous` would not copy if only strides of dimensions of size 1 differ."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _in_full(fields: Mapping[str, torch.Tensor], layout: StateLayout) -> dict[str, torch.Tensor]:
    """Return the optimizer state tensors in the optimizer's dtype: copies of those stored in another."""
    return {name: fields[name].to(state.dtype) for name, state in layout.items() if name in fields}


def _pages(states: Collection[str] | None) -> Pages:
    """Return the function that finds the pages with masters and these states of a group's pieces.

    Args:
        states: names of the state tensors; all bytes of the group if not given.
    """
    if states is None:
        return all_pages
    fields = {*MASTER_FIELDS, *states}
    return lambda group: group.pages_of(fields)


class Pieces:
    """Reads and writes pieces. The caller holds the lock of the stage and has applied pending updates.

    Args:
        rule: how parameters are updated, which decides the optimizer state.
        tier: where the pieces lie.
        ownership: which rank updates which pieces.
        masks: the masks of parameters.
    """

    def __init__(self, rule: UpdateRules, tier: Tier, ownership: Ownership, masks: StoredMasks) -> None:
        self._layouts = tier.layouts
        self._masks = masks
        self._rule = rule
        self._tier = tier
        self._ownership = ownership
        self._workspaces = Workspaces()

    def read(
        self,
        stage: int,
        image: torch.Tensor,
        *,
        states: Collection[str] | None,
        params: Collection[int] | None,
        mine: bool = False,
    ) -> Iterator[PieceState]:
        """Yield every piece of a stage that this rank can read. Each is valid until the next is yielded.

        A piece of a masked parameter is yielded in several runs of the dense parameter.

        Args:
            stage: the stage.
            image: its wire image.
            states: names of the state tensors to read; all if not given.
            params: only these parameters, by index.
            mine: only the pieces that this rank updates.
        """
        wires = self._stage(stage).flat_views(image)
        ownership = self._ownership
        groups = ownership.own_groups(stage, params) if mine else ownership.host_groups(stage, params)
        largest = max((piece.stop - piece.start for group in groups for piece in group.pieces), default=0)
        # All pieces share this memory: the first use of fresh memory costs more than joining a master.
        # `_workspaces` would not do, because a thread may read two stages in turn.
        scratch = torch.empty(largest, dtype=torch.float32, device="cpu")
        for group, rest in self._tier.groups(stage, groups, read=_pages(states)):
            for run in self._runs(stage, group.pieces):
                # `one_core` must not last during the yield, nor during the update before the first piece.
                with one_core():
                    found = self._state(stage, run, wires[run.piece.param], rest, states, scratch)
                yield found

    def _runs(self, stage: int, pieces: Sequence[Piece]) -> Iterator[Run]:
        most = self._layouts[stage].piece_elements
        for piece in pieces:
            yield from runs(piece, self._masks.of(stage, piece.param), most)

    def ranges(self, stage: int, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int, int]]:
        """Yield (piece, first element, end) of each `PieceState` in which pieces of a stage are written."""
        most = self._layouts[stage].piece_elements
        for piece in pieces:
            for start, stop in ranges(piece, self._masks.of(stage, piece.param), most):
                yield piece, start, stop

    def _state(
        self,
        stage: int,
        run: Run,
        wire: torch.Tensor,
        rest: torch.Tensor,
        states_read: Collection[str] | None,
        scratch: torch.Tensor,
    ) -> PieceState:
        piece = run.piece
        spec = self._stage(stage).params[piece.param]
        fields = run.fields(rest)
        master = read_master(piece.encoding, run.chosen(wire[run.start : run.stop]), fields, scratch)
        layout = self._rule.state_layout(spec)
        wanted = {name: layout[name] for name in layout if states_read is None or name in states_read}
        states = _in_full(fields, wanted)
        if spec.strides is not None:
            master, states = _row_major(spec, master, states)
        states = {name: run.expanded(state) for name, state in states.items()}
        return PieceState(piece.param, run.start, run.expanded(master), states)

    def write(self, stage: int, image: torch.Tensor, fill: Callable[[PieceState], None]) -> None:
        """Replace all pieces that this rank updates: call `fill` with each to write its new values.

        Args:
            stage: the stage.
            image: its wire image.
            fill: called with each piece; writes its `master` and `states`, whose values are undefined.
        """
        groups = self._ownership.own_groups(stage)
        wires = self._stage(stage).flat_views(image)
        for group, rest in self._tier.groups(stage, groups, read=no_pages, write=all_pages):
            for run in self._runs(stage, group.pieces):
                self._fill(stage, run, wires[run.piece.param], rest, fill)

    def change(
        self,
        stage: int,
        image: torch.Tensor,
        params: Collection[int],
        change: Callable[[PieceState], None],
        states: Collection[str] | None = None,
    ) -> None:
        """Call `change` with each piece of these parameters that this rank updates, and store the result.

        Args:
            stage: the stage.
            image: its wire image.
            params: indices of the parameters.
            change: called with each piece; changes its `master` and `states`.
            states: names of the state tensors that it uses; all if not given.
        """
        wires = self._stage(stage).flat_views(image)
        groups = self._ownership.own_groups(stage, params)
        pages = _pages(states)
        for group, rest in self._tier.groups(stage, groups, read=pages, write=pages):
            for run in self._runs(stage, group.pieces):
                self._fill(stage, run, wires[run.piece.param], rest, change, states, keep=True)

    def replace(
        self, stage: int, image: torch.Tensor, param: int, state: str | None, values: torch.Tensor
    ) -> None:
        """Replace the master or a state tensor in the pieces of a parameter that this rank updates.

        The old values are not read.

        Args:
            stage: the stage.
            image: its wire image; not used for a state tensor.
            param: index of the parameter.
            state: name of the state tensor; the master if not given.
            values: all new values, 1-D and row-major.
        """
        fields = MASTER_FIELDS if state is None else {state}
        wire = self._stage(stage).flat_views(image)[param]

        def fill(piece: PieceState) -> None:
            piece.master.copy_(values[piece.start : piece.start + piece.master.numel()])

        for group, rest in self._tier.groups(
            stage,
            self._ownership.own_groups(stage, {param}),
            read=lambda group: group.outer_pages_of(fields),
            write=lambda group: group.pages_of(fields),
        ):
            for run in self._runs(stage, group.pieces):
                if state is None:
                    self._fill(stage, run, wire, rest, fill, ())
                else:
                    target = arranged_state(self._stage(stage).params[param], run.fields(rest)[state])
                    count = target.numel() if run.places is None else run.stop - run.start
                    new = run.chosen(values[run.start : run.start + count])
                    target.copy_(new.view(target.shape))

    def _fill(
        self,
        stage: int,
        run: Run,
        wire: torch.Tensor,
        rest: torch.Tensor,
        fill: Callable[[PieceState], None],
        states_used: Collection[str] | None = None,
        *,
        keep: bool = False,
    ) -> None:
        """Call `fill` with a piece or a run, then store it. `fill` gets the present master only if `keep`."""
        piece = run.piece
        spec = self._stage(stage).params[piece.param]
        encoding, fields = piece.encoding, run.fields(rest)
        target = wire[run.start : run.stop]
        flat_wire = run.chosen(target)
        master = flat_wire
        if encoding is not Encoding.SAME:
            master = self._workspaces.get("master", flat_wire.numel())
            if keep:
                master = read_master(encoding, flat_wire, fields, master)
        layout = self._rule.state_layout(spec)
        used = {name: layout[name] for name in layout if states_used is None or name in states_used}
        states = _in_full(fields, used)
        if run.places is not None:
            whole = PieceState(
                piece.param,
                run.start,
                run.expanded(master),
                {name: run.expanded(state) for name, state in states.items()},
            )
            fill(whole)
            master = run.chosen(whole.master)
            for name, state in states.items():
                state.copy_(run.chosen(whole.states[name]))
        elif spec.strides is None:
            fill(PieceState(piece.param, piece.start, master, states))
        else:
            rows, state_rows = _row_major(spec, master, states)
            fill(PieceState(piece.param, piece.start, rows, state_rows))
            spec.arranged(master).copy_(rows.view(spec.shape))
            for name, value in state_rows.items():
                arranged_state(spec, states[name]).copy_(value)
        for name, value in states.items():
            if value.dtype != fields[name].dtype:
                # `copy_` rounds to nearest, so a value that was read from the field keeps its bits.
                fields[name].copy_(value)
        # This also computes the wire values, rounded as in an update.
        write_master(encoding, master, flat_wire, fields)
        if run.places is not None:
            target.zero_().index_copy_(0, run.places, flat_wire)

    def remask(self, stage: int, image: torch.Tensor, param: int, mask: PackedMask) -> None:
        """Change the mask of a parameter whose masked elements the store leaves out.

        Elements that the new mask adds are zeros with a state of zeros.

        Args:
            stage: the stage.
            image: its wire image.
            param: index of the parameter.
            mask: the new mask.
        """
        spec, before = self._stage(stage).params[param], self._masks.of(stage, param)
        assert before is not None, f"{spec.name} has no mask yet"
        self._stage(stage).flat_views(image)[param].view(spec.shape).masked_fill_(~mask.unpack(), 0)
        after, groups = KeptElements(mask), self._ownership.own_groups(stage, {param})
        common = CommonValues(before, after, spec.stored_numel)
        # All are taken before the first is given: an element may move to any other piece.
        for group, rest in self._tier.groups(stage, groups):
            for piece in group.pieces:
                common.take(piece, rest)
        self._masks.put((stage, param), spec, after)
        for group, rest in self._tier.groups(stage, groups, write=all_pages):
            for piece in group.pieces:
                common.give(piece, rest)

    def empty(self, stage: int, piece: Piece) -> PieceState:
        """Return a piece with undefined values, into which a piece of another host is received."""
        spec = self._stage(stage).params[piece.param]
        layout = self._rule.state_layout(spec)
        states = {
            field.name: torch.empty(field.shape, dtype=layout[field.name].dtype, device="cpu")
            for field in piece.fields
            if field.name in layout
        }
        master = torch.empty(piece.stop - piece.start, dtype=spec.dtype, device="cpu")
        return PieceState(piece.param, piece.start, master, states)

    def _stage(self, stage: int) -> StageSpec:
        return self._layouts[stage].stage
