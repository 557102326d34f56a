"""Applying a committed step to a stage, a few pieces at a time."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from headwater.core.stage import ParamSpec, StageSpec
from headwater.store.hold import Gradients
from headwater.store.layout import PIECE_ELEMENTS, Encoding, Group, Piece, encoding_of
from headwater.store.masters import read_master, write_master
from headwater.store.rule import Scalars, UpdateRule


@dataclasses.dataclass(frozen=True)
class Update:
    """What `WeightStore.commit` needs to know of a step.

    Attributes:
        step: its number; later steps have larger ones.
        options: optimizer arguments of this step, by name: `lr` and what else a schedule changes.
        max_norm: clip the global gradient norm to this.
        max_value: clip every gradient element to ± this.
        loss_scale: what the loss was multiplied with.
        skip_non_finite: drop a step whose gradient is not finite, instead of raising.
    """

    step: int
    options: Mapping[str, Any]
    max_norm: float | None = None
    max_value: float | None = None
    loss_scale: float = 1.0
    skip_non_finite: bool = False

    def factor(self, norm: torch.Tensor) -> torch.Tensor | None:
        """What gradients are multiplied with, clip and unscale in one; `None` where they stay as they are.

        The clip is that of `torch.nn.utils.clip_grad_norm_`.

        Args:
            norm: global 2-norm of the unscaled gradients.
        """
        factor = None
        if self.max_norm is not None:
            factor = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.loss_scale != 1.0:
            factor = (1.0 if factor is None else factor) * torch.tensor(1.0 / self.loss_scale)
        return factor


@dataclasses.dataclass(frozen=True)
class Part:
    """The update of one parameter.

    Attributes:
        number: which commit it is of.
        update: the step.
        factor: see `Update.factor`.
    """

    number: int
    update: Update
    factor: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class Pending:
    """An update that waits for its stage.

    Attributes:
        number: which commit it is of; of several, the last.
        parts: what is done to each parameter, by index; what is not named here keeps its gradient.
    """

    number: int
    parts: Mapping[int, Part]


class Workspaces(threading.local):
    """Scratch memory of a thread, kept between uses."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def get(self, name: str, numel: int) -> torch.Tensor:
        """An uninitialised fp32 tensor of `numel` elements; the same memory at each call with this name."""
        tensor = self._tensors.get(name)
        if tensor is None or tensor.numel() < numel:
            tensor = self._tensors[name] = torch.empty(numel, dtype=torch.float32)
        return tensor[:numel]


@dataclasses.dataclass
class _Loaded:
    """A piece while it is updated.

    Attributes:
        piece: which.
        encoding: how its master is kept.
        wire: its wire values, 1-D.
        fields: what the rest holds of it.
        master: its values, in the shape that the optimizer is to see.
        gradient: likewise.
    """

    piece: Piece
    encoding: Encoding
    wire: torch.Tensor
    fields: Mapping[str, torch.Tensor]
    master: torch.Tensor
    gradient: torch.Tensor


class Updater:
    """Applies updates in the calling thread, with as many cores as torch gives it there.

    Args:
        rule: how a piece is updated.
    """

    def __init__(self, rule: UpdateRule) -> None:
        self._rule = rule
        self._workspaces = Workspaces()

    def apply(
        self,
        stage: StageSpec,
        image: torch.Tensor,
        groups: Iterable[tuple[Group, torch.Tensor]],
        gradients: Gradients,
        scalars: list[Scalars | None],
        pending: Pending,
    ) -> list[Scalars | None]:
        """Update a stage.

        Args:
            stage: what is updated.
            image: its wire image; changed in place.
            groups: its groups with their bytes; changed in place.
            gradients: one per parameter; each that is used is given up when its parameter is done.
            scalars: the optimizer scalars of each parameter.
            pending: what is done to which parameter.

        Returns:
            The new scalars. Every piece of a parameter starts from the same old ones.
        """
        wires = [wire.view(-1) for wire in stage.views(image)]
        after = list(scalars)
        for group, rest in groups:
            changed = [p for p in group.pieces if p.param in pending.parts and gradients[p.param] is not None]
            for batch in _batches(changed):
                self._update(stage, batch, rest, wires, gradients, scalars, after, pending)
            for piece in changed:
                if piece.stop == stage.params[piece.param].numel:
                    gradients[piece.param] = None
        return after

    def _update(
        self,
        stage: StageSpec,
        batch: Sequence[Piece],
        rest: torch.Tensor,
        wires: Sequence[torch.Tensor],
        gradients: Gradients,
        before: Sequence[Scalars | None],
        after: list[Scalars | None],
        pending: Pending,
    ) -> None:
        """Update pieces together: an optimizer spends as long on one small parameter as on many."""
        total = sum(piece.stop - piece.start for piece in batch)
        masters, own_gradients = (self._workspaces.get(name, total) for name in ("master", "gradient"))
        alike: list[tuple[UpdateRule, dict[str, Any], list[_Loaded]]] = []
        for piece in batch:
            spec, part, gradient = (
                stage.params[piece.param],
                pending.parts[piece.param],
                gradients[piece.param],
            )
            assert gradient is not None, "only pieces with one are in a batch"
            loaded = self._load(spec, piece, rest, wires[piece.param], gradient, part, masters, own_gradients)
            masters, own_gradients = (space[piece.stop - piece.start :] for space in (masters, own_gradients))
            rule = self._rule.of(spec.name)
            options = dict(rule.spec.options(spec.name, spec.shape, part.update.options))
            for other, its_options, members in alike:
                if other is rule and its_options == options:
                    members.append(loaded)
                    break
            else:
                alike.append((rule, options, [loaded]))
        for rule, options, members in alike:
            new = rule.apply(
                [loaded.master for loaded in members],
                [loaded.gradient for loaded in members],
                [self._states(stage.params[loaded.piece.param], loaded.fields) for loaded in members],
                [before[loaded.piece.param] for loaded in members],
                options,
            )
            for loaded, scalars in zip(members, new, strict=True):
                after[loaded.piece.param] = scalars
                write_master(loaded.encoding, loaded.master.view(-1), loaded.wire, loaded.fields)

    def _load(
        self,
        spec: ParamSpec,
        piece: Piece,
        rest: torch.Tensor,
        wire: torch.Tensor,
        gradient: torch.Tensor,
        part: Part,
        masters: torch.Tensor,
        gradients: torch.Tensor,
    ) -> _Loaded:
        """Master and gradient of a piece, at the start of workspaces where they have to be computed."""
        run = slice(piece.start, piece.stop)
        encoding, fields, own_wire = encoding_of(spec), piece.views(rest), wire[run]
        master = read_master(encoding, own_wire, fields, masters)
        own = gradient.reshape(-1)[run]
        if own.dtype != master.dtype:
            own = gradients[: own.numel()].copy_(own)
        if part.factor is not None:
            own.mul_(part.factor)
        if (limit := part.update.max_value) is not None:
            own.clamp_(-limit, limit)
        shape = (-1,) if self._rule.elementwise else spec.shape
        return _Loaded(piece, encoding, own_wire, fields, master.view(shape), own.view(shape))

    def _states(self, spec: ParamSpec, fields: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        elementwise = self._rule.elementwise
        layout = self._rule.state_layout(spec)
        return {name: fields[name].view(-1) if elementwise else fields[name] for name in layout}


def _batches(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Runs of pieces, each of at least `PIECE_ELEMENTS` but for the last."""
    batch: list[Piece] = []
    for piece in pieces:
        batch.append(piece)
        if sum(each.stop - each.start for each in batch) >= PIECE_ELEMENTS:
            yield batch
            batch = []
    if batch:
        yield batch
