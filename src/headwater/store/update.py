"""Applying a committed step to a stage, a few pieces at a time."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from headwater.core.stage import ParamSpec, StageSpec
from headwater.store.gradients.port import Gradients
from headwater.store.layout import PIECE_ELEMENTS, Encoding, Group, Piece, encoding_of
from headwater.store.masters import read_master, write_master
from headwater.store.rule import Scalars, UpdateRule, needs_plain_kernel
from headwater.store.sparse import rows_of, with_values


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
        by_name: further options of the parameter of a name; they count more than those for all.
    """

    step: int
    options: Mapping[str, Any]
    max_norm: float | None = None
    max_value: float | None = None
    loss_scale: float = 1.0
    skip_non_finite: bool = False
    by_name: Callable[[str], Mapping[str, Any]] | None = None

    def options_of(self, name: str) -> Mapping[str, Any]:
        """The options of one parameter."""
        return self.options if self.by_name is None else {**self.options, **self.by_name(name)}

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

    def prepared(self, gradient: torch.Tensor, dtype: torch.dtype, space: torch.Tensor) -> torch.Tensor:
        """The gradient as the optimizer is to see it: in place, or in `space` if of another dtype."""
        if gradient.dtype != dtype:
            gradient = gradient.to(dtype) if gradient.is_sparse else space.copy_(gradient)
        if gradient.is_sparse:
            return self._prepared_sparse(gradient)
        if self.factor is not None:
            gradient.mul_(self.factor)
        limit = self.update.max_value
        if limit is not None:
            gradient.clamp_(-limit, limit)
        return gradient

    def _prepared_sparse(self, gradient: torch.Tensor) -> torch.Tensor:
        limit = self.update.max_value
        if self.factor is None and limit is None:
            return gradient
        gradient = gradient.coalesce()
        values = gradient.values()
        if self.factor is not None:
            values = values * self.factor
        if limit is not None:
            values = values.clamp(-limit, limit)
        return with_values(gradient, values)


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
        is_mine: Callable[[Piece], bool],
    ) -> list[Scalars | None]:
        """Update a stage, or the share of it that is this rank's.

        Args:
            stage: what is updated.
            image: its wire image; changed in place.
            groups: its groups with their bytes; changed in place.
            gradients: one per parameter; each that is used is given up when its parameter is done.
            scalars: the optimizer scalars of each parameter.
            pending: what is done to which parameter.
            is_mine: which pieces to update.

        Returns:
            The new scalars. Every piece of a parameter starts from the same old ones.
        """
        wires = stage.flat_views(image)
        after = list(scalars)
        for group, rest in groups:
            changed = [p for p in group.pieces if p.param in pending.parts and gradients[p.param] is not None]
            for batch in _batches([piece for piece in changed if is_mine(piece)]):
                loaded = self._load(stage, batch, wires, rest, gradients, pending)
                for piece, new in self._update(loaded, scalars):
                    after[piece.param] = new
            for piece in changed:
                if piece.stop == stage.params[piece.param].numel:
                    gradients[piece.param] = None
        return after

    def _load(
        self,
        stage: StageSpec,
        batch: Sequence[Piece],
        wires: Sequence[torch.Tensor],
        rest: torch.Tensor,
        gradients: Gradients,
        pending: Pending,
    ) -> list[_Loaded]:
        """Masters and gradients of pieces, ready for the optimizer."""
        sizes = [piece.stop - piece.start for piece in batch]
        spaces = [self._workspaces.get(name, sum(sizes)).split(sizes) for name in ("master", "gradient")]
        loaded = []
        for piece, master_space, gradient_space in zip(batch, *spaces, strict=True):
            spec, part = stage.params[piece.param], pending.parts[piece.param]
            gradient = gradients[piece.param]
            assert gradient is not None, "only what has got one is updated"
            encoding, fields = encoding_of(spec), piece.views(rest)
            wire = wires[piece.param][piece.start : piece.stop]
            master = read_master(encoding, wire, fields, master_space)
            own = part.prepared(_part_of(gradient, spec, piece), master.dtype, gradient_space)
            flat_master = master
            states = {name: fields[name] for name in self._rule.state_layout(spec)}
            if gradient.is_sparse:
                rows = (-1, *spec.shape[1:])
                master, states = master.view(rows), {k: v.view(rows) for k, v in states.items()}
            elif self._rule.elementwise:
                states = {name: state.view(-1) for name, state in states.items()}
            else:
                master, own = spec.arranged(master), spec.arranged(own)
                states = {
                    name: spec.arranged(state.view(-1)) if state.shape == spec.shape else state
                    for name, state in states.items()
                }
            rule = self._rule.of(spec.name)
            options = dict(rule.spec.options(spec.name, spec.shape, part.update.options_of(spec.name)))
            loaded.append(
                _Loaded(piece, rule, options, encoding, wire, fields, flat_master, master, own, states)
            )
        return loaded

    def _update(
        self, loaded: Sequence[_Loaded], scalars: Sequence[Scalars | None]
    ) -> Iterator[tuple[Piece, Scalars]]:
        """The pieces, updated, with their new scalars; all that are alike in one call of the optimizer.

        It spends as long on a call for one small parameter as for many.
        """
        todo = list(loaded)
        while todo:
            first = todo[0]
            alike = [each for each in todo if each.is_like(first)]
            todo = [each for each in todo if each not in alike]
            new = first.rule.apply(
                [each.master for each in alike],
                [each.gradient for each in alike],
                [each.states for each in alike],
                [scalars[each.piece.param] for each in alike],
                first.options,
            )
            for each, its_scalars in zip(alike, new, strict=True):
                write_master(each.encoding, each.flat_master, each.wire, each.fields)
                yield each.piece, its_scalars


@dataclasses.dataclass(eq=False)
class _Loaded:
    """A piece while it is updated.

    Attributes:
        piece: which.
        rule: by what it is updated.
        options: arguments of the optimizer.
        encoding: how its master is kept.
        wire: its wire values, 1-D.
        fields: what the rest holds of it.
        flat_master: its values, 1-D in the order of memory.
        master: the same, in the shape that the optimizer is to see.
        gradient: likewise.
        states: likewise.
    """

    piece: Piece
    rule: UpdateRule
    options: dict[str, Any]
    encoding: Encoding
    wire: torch.Tensor
    fields: Mapping[str, torch.Tensor]
    flat_master: torch.Tensor
    master: torch.Tensor
    gradient: torch.Tensor
    states: dict[str, torch.Tensor]

    def is_like(self, other: _Loaded) -> bool:
        """True if one call of the optimizer can update both."""
        kernel = needs_plain_kernel(self.gradient) == needs_plain_kernel(other.gradient)
        return kernel and self.rule is other.rule and self.options == other.options


def _part_of(gradient: torch.Tensor, spec: ParamSpec, piece: Piece) -> torch.Tensor:
    """Return the gradient of a piece: 1-D, or the rows of the piece where it is sparse."""
    if not gradient.is_sparse:
        return spec.in_memory_order(gradient)[piece.start : piece.stop]
    return rows_of(gradient, piece.start // spec.row_numel, piece.stop // spec.row_numel)


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
