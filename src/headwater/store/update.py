"""Applying a committed step to a stage, piece by piece, each piece on one core."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import wait
from typing import Any

import torch

from headwater.core.stage import StageSpec
from headwater.core.threads import single_core_pool
from headwater.store.hold import Gradients
from headwater.store.layout import Group, Piece, encoding_of
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


class Updater:
    """Applies updates in threads of its own.

    Args:
        rule: how a piece is updated.
        num_threads: pieces at a time.
    """

    def __init__(self, rule: UpdateRule, num_threads: int) -> None:
        self._rule = rule
        self._threads = single_core_pool(num_threads, "headwater-update")
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
        wires = stage.views(image)
        after = list(scalars)

        def update(piece: Piece, rest: torch.Tensor) -> None:
            gradient, part = gradients[piece.param], pending.parts.get(piece.param)
            if gradient is not None and part is not None:
                wire = wires[piece.param].view(-1)[piece.start : piece.stop]
                old = scalars[piece.param]
                after[piece.param] = self._piece(stage, piece, wire, rest, gradient, old, part)

        for group, rest in groups:
            updates = [self._threads.submit(update, piece, rest) for piece in group.pieces]
            wait(updates)  # also if one fails: the group's memory is another reader's then
            for done in updates:
                done.result()
            for piece in group.pieces:
                if piece.stop == stage.params[piece.param].numel and piece.param in pending.parts:
                    gradients[piece.param] = None
        wires.clear()  # a worker keeps its last job a while: let it hold no view of a slab
        return after

    def _piece(
        self,
        stage: StageSpec,
        piece: Piece,
        wire: torch.Tensor,
        rest: torch.Tensor,
        gradient: torch.Tensor,
        scalars: Scalars | None,
        part: Part,
    ) -> Scalars:
        spec = stage.params[piece.param]
        encoding, fields = encoding_of(spec), piece.views(rest)
        master = read_master(encoding, wire, fields, self._workspaces.get("master", wire.numel()))
        own = self._prepared(gradient.reshape(-1)[piece.start : piece.stop], master.dtype, part)
        elementwise = self._rule.elementwise
        shape = (piece.stop - piece.start,) if elementwise else spec.shape
        states = {
            name: fields[name].view(-1) if elementwise else fields[name]
            for name in self._rule.state_layout(spec)
        }
        rule = self._rule.of(spec.name)
        options = rule.spec.options(spec.name, spec.shape, part.update.options)
        new = rule.apply(master.view(shape), own.view(shape), states, scalars, options)
        write_master(encoding, master, wire, fields)
        return new

    def _prepared(self, gradient: torch.Tensor, dtype: torch.dtype, part: Part) -> torch.Tensor:
        if gradient.dtype != dtype:
            gradient = self._workspaces.get("gradient", gradient.numel()).copy_(gradient)
        if part.factor is not None:
            gradient.mul_(part.factor)
        limit = part.update.max_value
        if limit is not None:
            gradient.clamp_(-limit, limit)
        return gradient

    def close(self) -> None:
        """Give back threads."""
        self._threads.shutdown(wait=True, cancel_futures=True)
