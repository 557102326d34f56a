"""The interface of piece updates. An implementation updates pieces of a stage whose bytes are in memory."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from headwater.store.kept import Operands

if TYPE_CHECKING:
    from headwater.store.gradients.port import Gradients
    from headwater.store.kept import KeptElements
    from headwater.store.layout import Piece, Scalars, StageLayout
    from headwater.store.rules import UpdateRules
    from headwater.store.update import Pending, Progress


@dataclasses.dataclass(frozen=True, eq=False)
class StageJob:
    """The update of one stage: see `Updater.apply`.

    Attributes:
        layout: the layout of the stage.
        rules: how its parameters are updated.
        image: its wire image, which the update changes.
        gradients: one per parameter, on the device of `image`.
        scalars: the optimizer scalars of each parameter before the update.
        pending: the update of each parameter.
        progress: the pieces that are done; changed.
        kept: the kept elements of each masked parameter, by index.
    """

    layout: StageLayout
    rules: UpdateRules
    image: torch.Tensor
    gradients: Gradients
    scalars: Sequence[Scalars | None]
    pending: Pending
    progress: Progress
    kept: Mapping[int, KeptElements] = dataclasses.field(default_factory=dict)

    @cached_property
    def wires(self) -> Sequence[torch.Tensor]:
        """The wire values of each parameter, 1-D."""
        return self.layout.stage.flat_views(self.image)

    def options(self, param: int) -> dict[str, Any]:
        """Return the optimizer options of one parameter that differ from those of its rule's spec."""
        spec = self.layout.stage.params[param]
        step_options: Mapping[str, Any] = self.pending.parts[param].update.options_of(spec.name)
        return self.rules.of(spec.name).spec.options(spec.name, spec.shape, step_options)

    def gradient(self, param: int) -> torch.Tensor:
        """Return the summed gradient of one parameter, which must have one."""
        gradient = self.gradients[param]
        assert gradient is not None, "only parameters with a gradient are updated"
        return gradient

    def operands(self, piece: Piece) -> Operands:
        """Return the wire values and the gradient of a piece."""
        param = piece.param
        spec, kept = self.layout.stage.params[param], self.kept.get(param)
        return Operands.of(piece, spec, kept, self.wires[param], self.gradient(param))


class PieceUpdate(abc.ABC):
    """Runs the optimizer over pieces of one stage, in the thread of the caller."""

    @abc.abstractmethod
    def apply(self, pieces: Sequence[Piece], rest: torch.Tensor) -> None:
        """Update pieces of one group, and record each in the job's progress.

        Args:
            pieces: pieces of the group that are not done, and whose parameters have gradients.
            rest: the bytes of the group; changed in place.

        Raises:
            torch.OutOfMemoryError: if the device has no memory left. If `progress.undoable`, each piece that
                is not done then has its old values.
        """


def batches(pieces: Sequence[Piece], elements: int) -> Iterator[list[Piece]]:
    """Yield lists of successive pieces with at least `elements` elements; the last may have fewer."""
    batch: list[Piece] = []
    numel = 0
    for piece in pieces:
        batch.append(piece)
        numel += piece.stop - piece.start
        if numel >= elements:
            yield batch
            batch, numel = [], 0
    if batch:
        yield batch
