"""Updates of pieces by optimizers of torch: a few pieces at a time, in several passes over their values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import torch

from headwater.core.modes import only_autocast
from headwater.core.stage import ParamSpec
from headwater.store.kept import Operands
from headwater.store.layout import MASTER_FIELDS, Piece, Scalars, arranged_state, stored_dtype
from headwater.store.masters import Workspaces, num_bits, read_master, write_master
from headwater.store.piece_update import PieceUpdate, StageJob, batches
from headwater.store.rounding import prepare_rounding, round_stochastically, state_stream

if TYPE_CHECKING:
    from headwater.store.rule import UpdateRule
    from headwater.store.update import Update


@final
class TorchPieces(PieceUpdate):
    """Runs optimizers of torch or of the user, on any device.

    Args:
        job: the update of a stage.
        workspaces: memory of the calling thread for masters, gradients and state in fp32.
    """

    def __init__(self, job: StageJob, workspaces: Workspaces) -> None:
        self._job = job
        self._workspaces = workspaces

    def apply(self, pieces: Sequence[Piece], rest: torch.Tensor) -> None:
        for batch in batches(pieces, self._job.layout.piece_elements):
            self._update(self._load(batch, rest))

    def _load(self, batch: Sequence[Piece], rest: torch.Tensor) -> list[_Loaded]:
        """Load the masters and optimizer state of pieces, and scale and clip their gradients.

        Allocates all memory that the update needs outside of the optimizer.
        """
        job = self._job
        operands = [job.operands(piece) for piece in batch]
        sizes = [each.wire.numel() for each in operands]
        bits = self._bits(batch, sizes, rest.device)
        loaded = []
        for each, space in zip(operands, self._workspaces.shares(sizes, rest.device), strict=True):
            piece = each.piece
            spec, part = job.layout.stage.params[piece.param], job.pending.parts[piece.param]
            rule = job.rules.of(spec.name)
            fields = each.fields(rest)
            master = read_master(piece.encoding, each.wire, fields, space("master"), bits)
            own = part.prepared(each.gradient, master.dtype, space("gradient"))
            flat_master = master
            states = {name: field for name, field in fields.items() if name not in MASTER_FIELDS}
            wide = {
                name: space(f"state {name}").view(states[name].shape).copy_(states[name])
                for name, state in rule.state_layout(spec).items()
                if stored_dtype(spec, state) != state.dtype
            }
            if wide:
                prepare_rounding(rest.device)
            states |= wide
            if own.is_sparse:
                # A sparse kernel addresses rows.
                rows = (-1, *spec.shape[1:])
                master, states = master.view(rows), {k: v.view(rows) for k, v in states.items()}
            elif job.rules.elementwise:
                states = {name: state.view(-1) for name, state in states.items()}
            else:
                master, own = spec.arranged(master), spec.arranged(own)
                states = {name: arranged_state(spec, state) for name, state in states.items()}
            loaded.append(
                _Loaded(
                    each,
                    spec,
                    part.update,
                    rule,
                    job.options(piece.param),
                    fields,
                    bits,
                    flat_master,
                    wide,
                    master,
                    own,
                    states,
                )
            )
        return loaded

    def _bits(self, batch: Sequence[Piece], sizes: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return memory for `read_master` and `write_master` of any piece of a batch."""
        numel = max(num_bits(piece.encoding, size, device) for piece, size in zip(batch, sizes, strict=True))
        return self._workspaces.get("bits", numel, device).view(torch.int32)

    def _update(self, loaded: Sequence[_Loaded]) -> None:
        """Run the optimizer over loaded pieces, and record them in the job's progress.

        Pieces with equal options share one call of the optimizer, because a call for one small parameter
        takes as long as a call for many.
        """
        progress = self._job.progress
        todo = list(loaded)
        while todo:
            first = todo[0]
            alike = list[_Loaded]()
            others = list[_Loaded]()
            for each in todo:
                (alike if each.is_like(first) else others).append(each)
            todo = others
            with only_autocast(first.update.autocast):
                new = first.rule.apply(
                    [each.master for each in alike],
                    [each.gradient for each in alike],
                    [each.states for each in alike],
                    [self._job.scalars[each.operands.piece.param] for each in alike],
                    first.options,
                    undoable=progress.undoable,
                )
            for each, its_scalars in zip(alike, new, strict=True):
                # Before the next batch overwrites the workspace that holds the masters.
                operands = each.operands
                write_master(operands.piece.encoding, each.flat_master, operands.wire, each.fields, each.bits)
                operands.put_back()
                _round_states(each, its_scalars)
                progress.note(operands.piece, its_scalars)


@dataclasses.dataclass(eq=False)
class _Loaded:
    """A piece with all tensors that the optimizer needs to update it.

    Attributes:
        operands: the piece, its wire values and its gradient.
        spec: its parameter.
        update: the update.
        rule: its optimizer.
        options: arguments of the optimizer.
        fields: its tensors beside the wire image.
        bits: memory for `write_master`, which all pieces of a batch share.
        flat_master: its values, 1-D in the order of memory.
        wide_states: fp32 copies of the optimizer state that is stored in bf16, in the order of memory.
        master: the same values, in the shape that the optimizer expects.
        gradient: the gradient, in that shape.
        states: the optimizer state tensors, in that shape.
    """

    operands: Operands
    spec: ParamSpec
    update: Update
    rule: UpdateRule
    options: dict[str, Any]
    fields: Mapping[str, torch.Tensor]
    bits: torch.Tensor
    flat_master: torch.Tensor
    wide_states: Mapping[str, torch.Tensor]
    master: torch.Tensor
    gradient: torch.Tensor
    states: dict[str, torch.Tensor]

    def is_like(self, other: _Loaded) -> bool:
        """True if one call of the optimizer can update this piece and `other`."""
        mine, its = self.gradient, other.gradient
        same_kind = mine.dtype == its.dtype and mine.is_sparse == its.is_sparse
        same_kind = same_kind and self.update.autocast == other.update.autocast
        return same_kind and self.rule is other.rule and self.options == other.options


def _round_states(loaded: _Loaded, scalars: Scalars) -> None:
    """Store the optimizer state of a piece that is kept in bf16.

    Args:
        loaded: the piece, after its update.
        scalars: the new scalars of its parameter.
    """
    count = int(scalars.get("step", loaded.update.step))
    for name, values in loaded.wide_states.items():
        out = loaded.fields[name].view(-1)
        stream = state_stream(loaded.spec.name, name, count)
        round_stochastically(values.view(-1), out, stream=stream, start=loaded.operands.piece.start)
