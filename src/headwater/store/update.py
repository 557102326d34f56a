"""The settings of an optimizer step (`Update`), and the pending update of a stage (`Pending`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from headwater.core.errors import NonFiniteError
from headwater.core.stage import StageSpec
from headwater.store.layout import Piece, Scalars
from headwater.store.sparse import with_values


@dataclasses.dataclass(frozen=True)
class Update:
    """The settings of one optimizer step; the argument of `WeightStore.commit`.

    Attributes:
        step: its number; later steps have larger ones.
        options: optimizer arguments of this step, by name: `lr` and others that a schedule changes.
        max_norm: clip the global gradient norm to this.
        max_value: clip every gradient element to ± this.
        loss_scale: the factor by which the loss was multiplied.
        skip_non_finite: drop a step whose gradient is not finite, instead of raising.
        by_name: returns further options of a parameter from its name; they override `options`.
        autocast: the autocast around the step: type of device -> dtype. Some optimizers multiply matrices.
    """

    step: int
    options: Mapping[str, Any]
    max_norm: float | None = None
    max_value: float | None = None
    loss_scale: float = 1.0
    skip_non_finite: bool = False
    by_name: Callable[[str], Mapping[str, Any]] | None = None
    autocast: Mapping[str, torch.dtype] = dataclasses.field(default_factory=dict)

    def options_of(self, name: str) -> Mapping[str, Any]:
        """Return the optimizer options of one parameter in this step."""
        return self.options if self.by_name is None else {**self.options, **self.by_name(name)}

    def factor(self, norm: torch.Tensor) -> torch.Tensor | None:
        """Return the factor that clips and unscales all gradients. `None` if neither is needed.

        The clip is that of `torch.nn.utils.clip_grad_norm_`.

        Args:
            norm: global 2-norm of the unscaled gradients.
        """
        factor = None
        if self.max_norm is not None:
            # The constant of torch: without it the bits would differ.
            factor = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.loss_scale != 1.0:
            unscale = torch.tensor(1.0 / self.loss_scale, dtype=torch.float32, device="cpu")
            factor = unscale if factor is None else factor * unscale
        return factor


NOT_APPLIED = "; the step was not applied"
"""The end of a remedy for a step that leaves no trace."""


def non_finite_error(stages: Sequence[StageSpec], first: int | None, update: Update) -> NonFiniteError:
    """Return the error for a step whose gradient is not finite, and which was not applied.

    Args:
        stages: the stages.
        first: the first stage in backward with such a gradient, if it is known.
        update: the step.
    """
    return NonFiniteError(
        f"the gradient of step {update.step} is not finite",
        where=None if first is None else f"stage {stages[first].name!r}, the first one in backward",
        remedy=f"lower the learning rate, clip gradients, or look at the data of this step{NOT_APPLIED}",
    )


@dataclasses.dataclass(frozen=True)
class Part:
    """The update of one parameter in one commit.

    Attributes:
        number: the number of the commit.
        update: the step.
        factor: see `Update.factor`.
    """

    number: int
    update: Update
    factor: torch.Tensor | None

    def prepared(self, gradient: torch.Tensor, dtype: torch.dtype, space: torch.Tensor) -> torch.Tensor:
        """Return the gradient, scaled and clipped. The argument is not changed: an update may run again.

        Args:
            gradient: the summed gradient of a piece; dense or sparse.
            dtype: dtype of the master.
            space: fp32 memory for the result, of the gradient's shape; used if the result is dense and fp32.
        """
        if gradient.dtype != dtype:
            gradient = gradient.to(dtype) if gradient.is_sparse else space.copy_(gradient)
        if gradient.is_sparse:
            return self._prepared_sparse(gradient)
        # The factor comes before the clip, because a loop of torch unscales before `clip_grad_value_`.
        out = space if gradient.dtype == space.dtype else None
        if self.factor is not None:
            gradient = torch.mul(gradient, self.factor, out=out)
        limit = self.update.max_value
        if limit is not None:
            gradient = torch.clamp(gradient, -limit, limit, out=out)
        return gradient

    def _prepared_sparse(self, gradient: torch.Tensor) -> torch.Tensor:
        limit = self.update.max_value
        if self.factor is None and limit is None:
            return gradient
        # Entries of one row must be added before they are clipped.
        gradient = gradient.coalesce()
        values = gradient.values()
        if self.factor is not None:
            values = values * self.factor
        if limit is not None:
            values = values.clamp(-limit, limit)
        return with_values(gradient, values)


@dataclasses.dataclass(frozen=True)
class Pending:
    """The pending update of one stage: committed, not yet applied.

    Attributes:
        number: the number of the commit; that of the last one if several commits have parts.
        parts: the update of each parameter, by index. Other parameters of the stage keep their gradients.
    """

    number: int
    parts: Mapping[int, Part]


@dataclasses.dataclass
class Progress:
    """The part of a stage's update that is done. An update that failed for lack of memory continues there.

    Attributes:
        after: the new scalars of each parameter with a piece that is done; the old ones of the others.
        undoable: true if each piece must be updated as a whole or not at all, because memory may be missing.
        done: the pieces that are done: parameter and first element.
    """

    after: list[Scalars | None]
    undoable: bool = False
    done: set[tuple[int, int]] = dataclasses.field(default_factory=set)

    @classmethod
    def of(cls, scalars: Sequence[Scalars | None], *, undoable: bool = False) -> Progress:
        """Return the progress of an update that has not begun, from the scalars of each parameter."""
        # The list is a copy: a second piece must start from the same step count as the first.
        return cls(list(scalars), undoable)

    def note(self, piece: Piece, scalars: Scalars) -> None:
        """Record that a piece is done, and the new scalars of its parameter."""
        self.after[piece.param] = scalars
        self.done.add((piece.param, piece.start))

    def has(self, piece: Piece) -> bool:
        """True if a piece is done."""
        return (piece.param, piece.start) in self.done
