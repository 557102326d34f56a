"""Gradients on their way to the update: summed over micro-batches, measured, lent to who looks at them."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from headwater.core.errors import StreamError
from headwater.core.stage import StageSpec
from headwater.store.hold import GradientHold, Gradients
from headwater.store.layout import PIECE_ELEMENTS
from headwater.store.sparse import add, values_of

_NARROW = (torch.bfloat16, torch.float16)

ParamKey = tuple[int, int]
"""A parameter: its stage, and its index in the stage."""


@dataclasses.dataclass
class _Arriving:
    gradients: Gradients
    received: set[int] = dataclasses.field(default_factory=set)


class GradientSum:
    """Sums the gradients of a step's micro-batches and takes their norms as they arrive.

    A sum is *present* until a commit takes it or it is dropped; what a commit has taken stays in the hold
    until the update of its stage.

    Attributes:
        present: the sums that are there.
        spent: parameters whose sum a step has used, and that nobody has dropped since; what is added to such
            a sum is lost as well.
        sparse: parameters whose newest sum is or was a sparse tensor.
        first_bad: the first stage whose gradient was not finite.

    Args:
        stages: the stages.
        hold: where sums wait.
        mixed_sum_dtype: dtype of the sums of mixed-precision gradients; `None` keeps the gradient's own until
            there is a second one to add, which is exact where there is one micro-batch.
    """

    def __init__(
        self, stages: Sequence[StageSpec], hold: GradientHold, mixed_sum_dtype: torch.dtype | None
    ) -> None:
        self._stages = stages
        self._hold = hold
        self._mixed_sum_dtype = mixed_sum_dtype
        self._arriving: dict[int, _Arriving] = {}
        self._norms: dict[ParamKey, torch.Tensor] = {}
        self._exposed: dict[ParamKey, torch.Tensor] = {}
        self.present: set[ParamKey] = set()
        self.sparse: set[ParamKey] = set()
        self.spent: set[ParamKey] = set()
        self.first_bad: int | None = None
        self._before = (frozenset[ParamKey](), frozenset[ParamKey]())  # present and spent at `remember`
        self._kept: set[int] = set()  # stages whose sums of then are kept

    @property
    def touched(self) -> set[int]:
        """The stages of which sums are present."""
        return {stage for stage, _ in self.present}

    def add(self, stage: int, param: int, gradient: torch.Tensor, *, last: bool) -> bool:
        """Take the gradient of one parameter for one micro-batch.

        Args:
            stage: its stage.
            param: its index in the stage.
            gradient: it belongs to the store from now on.
            last: whether it is the step's last micro-batch, as far as is known.

        Returns:
            Whether all trainable parameters of the stage have got theirs, so that it may be settled.
        """
        if (stage, param) in self.spent:
            return False
        arriving = self._arriving_at(stage)
        total = self._sum(arriving.gradients[param], gradient, stage, param)
        arriving.gradients[param] = total
        self._note_kind((stage, param), total)
        self._norms.pop((stage, param), None)
        self.present.add((stage, param))
        arriving.received.add(param)
        if last:
            self._measure((stage, param), total)
        return len(arriving.received) == sum(p.requires_grad for p in self._stages[stage].params)

    def _note_kind(self, key: ParamKey, total: torch.Tensor) -> None:
        if total.is_sparse:
            self.sparse.add(key)
        else:
            self.sparse.discard(key)

    def _arriving_at(self, stage: int) -> _Arriving:
        if stage not in self._arriving:
            self._keep(stage)
            self._put_back_exposed(stage)
            held = self._hold.take(stage)
            self._arriving[stage] = _Arriving(held or [None] * len(self._stages[stage].params))
        return self._arriving[stage]

    def _sum(
        self, total: torch.Tensor | None, gradient: torch.Tensor, stage: int, param: int
    ) -> torch.Tensor:
        if total is None:
            wide = self._mixed_sum_dtype or gradient.dtype
            return gradient.detach() if gradient.dtype == wide else gradient.to(wide)
        if total.dtype in _NARROW:
            total = total.to(self._stages[stage].params[param].dtype)
        return add(total, gradient, in_place=stage not in self._kept)

    def _measure(self, key: ParamKey, total: torch.Tensor) -> None:
        norm = self._norms[key] = gradient_norm(total)
        if self.first_bad is None and not bool(norm.isfinite()):
            self.first_bad = key[0]

    def settle(self, stage: int) -> None:
        """Hold what has arrived for a stage."""
        arriving = self._arriving.pop(stage, None)
        if arriving is not None:
            self._hold.put(stage, arriving.gradients)

    def settle_all(self) -> None:
        """Hold everything that has arrived."""
        for stage in sorted(self._arriving):
            self.settle(stage)

    @property
    def is_ahead(self) -> bool:
        """Whether so many gradients wait to be added that the next ones should not be computed yet."""
        return False

    def catch_up(self) -> None:
        """Return when this is no longer so."""

    def complete(self) -> None:
        """Return when all gradients of the step are there."""
        self.settle_all()

    def end_micro_batch(self) -> None:
        """No more gradients of this micro-batch will come."""
        self.settle_all()

    def norm(self, keys: Sequence[ParamKey]) -> torch.Tensor:
        """The global norm, fp32, as `torch.nn.utils.get_total_norm` takes it in this order."""
        self.settle_all()
        missing = {key for key in keys if key not in self._norms or key in self._exposed}
        for stage in sorted({stage for stage, _ in missing}):
            self._put_back_exposed(stage)
            for param, total in enumerate(self._hold.look(stage)):
                if total is not None and (stage, param) in missing:
                    self._measure((stage, param), total)
        norms = [self._norms[key] for key in keys]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def commit(self, keys: Iterable[ParamKey]) -> None:
        """These sums belong to an update from now on."""
        for key in keys:
            self._keep(key[0])
            self._end_loan(key)
            self._forget(key)
        self.first_bad = None

    def spend(self, keys: Iterable[ParamKey]) -> None:
        """Say of sums that a commit has taken that their owner has them still, until `drop` or `replace`."""
        self.spent.update(keys)

    def _forget(self, key: ParamKey) -> None:
        self.present.discard(key)
        self._norms.pop(key, None)
        self._exposed.pop(key, None)

    def take(self, stage: int) -> Gradients | None:
        """Give what is held of a stage away, what a commit has taken and what not."""
        self.settle(stage)
        self._put_back_exposed(stage)
        return self._hold.take(stage)

    def put_back(self, stage: int, gradients: Gradients) -> None:
        """Hold on to what an update did not want."""
        if any(gradient is not None for gradient in gradients):
            self._hold.put(stage, gradients)

    def leave(self, stage: int) -> None:
        """Another rank updates a stage with what a commit has taken of it."""

    def drop(self, stage: int, param: int) -> None:
        """Forget the sum of one parameter, if it has one that is not an update's already."""
        self.spent.discard((stage, param))
        if (stage, param) in self.present:
            self._keep(stage)
            self.settle(stage)
            self._forget((stage, param))
            self._hold.drop(stage, param)

    def discard(self) -> None:
        """Drop every sum that no commit has taken."""
        for stage, param in list(self.present):
            self.drop(stage, param)
        self.spent.clear()
        self.first_bad = None

    def discard_stage(self, stage: int) -> None:
        """Drop everything of a stage, what a commit has taken included."""
        self.take(stage)
        for key in [key for key in self.present if key[0] == stage]:
            self._forget(key)

    # gradients that the user looks at

    def expose(self, stage: int, param: int) -> torch.Tensor | None:
        """The sum of one parameter, if one is present. It may be changed in place until the commit."""
        key = (stage, param)
        if key not in self.present:
            return None
        if key not in self._exposed:
            self._keep(stage)
            self.settle(stage)
            held = self._hold.look(stage)
            if self._hold.is_memory and stage in self._kept:  # what is kept must not be changed
                held[param] = _copy(held[param])
            for index, gradient in enumerate(held):  # what is read from disk is read once
                if gradient is not None and (stage, index) in self.present:
                    self._exposed.setdefault((stage, index), gradient.detach())
        return self._exposed[key]

    def multiply(self, stage: int, param: int, factor: Callable[[], torch.Tensor]) -> None:
        """Multiply the sum of one parameter, if one is present; every rank says so, between two `complete`.

        Args:
            stage: its stage.
            param: its index in the stage.
            factor: gives a tensor of its shape, where one is needed.
        """
        total = self.expose(stage, param)
        if total is not None:
            total.mul_(factor())

    def replace(self, stage: int, param: int, gradient: torch.Tensor) -> None:
        """Let this be the sum of one parameter."""
        self._arriving_at(stage).gradients[param] = gradient.detach()
        self._note_kind((stage, param), gradient)
        self._forget((stage, param))
        self.spent.discard((stage, param))
        self.present.add((stage, param))

    def _put_back_exposed(self, stage: int) -> None:
        """What may have been changed in a copy of a held gradient goes back to the hold."""
        if self._hold.is_memory:
            return
        exposed = {key[1]: self._exposed.pop(key) for key in list(self._exposed) if key[0] == stage}
        if exposed:
            held = self._hold.take(stage) or []
            self._hold.put(stage, [exposed.get(param, total) for param, total in enumerate(held)])

    def _end_loan(self, key: ParamKey) -> None:
        """What somebody outside still has of a sum is no longer the sum itself."""
        stage, param = key
        self._put_back_exposed(stage)
        if key in self._exposed:
            lent = weakref.ref(self._exposed.pop(key))
            if lent() is not None:
                held = self._hold.look(stage)
                held[param] = _copy(held[param])

    # a step that may have to be undone

    def remember(self, present: Iterable[ParamKey] | None = None) -> None:
        """From now on `restore` can bring back the sums of now, or those of them that are named."""
        self.settle_all()
        self.forget()
        before = self.present if present is None else self.present.intersection(present)
        self._before = frozenset(before), frozenset(self.spent)

    @property
    def remembered(self) -> frozenset[ParamKey]:
        """The sums that were there at `remember`, whether or not they still are."""
        return self._before[0]

    def _keep(self, stage: int) -> None:
        """Keep the sums of a stage that are there since `remember`, before one of them changes."""
        if stage not in self._kept and any(key[0] == stage for key in self._before[0]):
            self._kept.add(stage)
            self.settle(stage)
            self._put_back_exposed(stage)
            self._hold.keep(stage)

    def restore(self, taken: Collection[ParamKey], waiting: Collection[ParamKey]) -> None:
        """Bring back the sums that were there at `remember`, and drop what came since.

        Args:
            taken: what commits since then have taken that stay.
            waiting: what belongs to updates that are still to come.
        """
        self.settle_all()
        before = self._before[0].difference(taken, waiting)
        for stage in self._kept:
            self._hold.restore(stage)
        for stage, spec in enumerate(self._stages):
            for param in range(len(spec.params)):
                if (stage, param) not in before and (stage, param) not in waiting:
                    self._hold.drop(stage, param)
        self._norms.clear()
        self._exposed.clear()
        self.present, self.spent, self.first_bad = set(before), set(self._before[1]), None
        self.forget()

    def forget(self) -> None:
        """There is nothing any more that need be brought back."""
        self._before = frozenset(), frozenset()
        self._kept.clear()
        self._hold.forget()

    def close(self) -> None:
        """Give back memory and files."""
        self._exposed.clear()
        self._hold.close()


def spent_error(name: str) -> StreamError:
    """The error for a gradient that is used after a step has used it up."""
    return StreamError(
        "this gradient was used up by optimizer.step(), and plain PyTorch would still have it",
        where=name,
        remedy="read it before optimizer.step(), and call zero_grad() before the next backward or step",
    )


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()


def gradient_norm(gradient: torch.Tensor) -> torch.Tensor:
    """2-norm in fp32 (or wider). Of a narrow gradient it is taken piece by piece, without a wide copy."""
    gradient = values_of(gradient)
    if gradient.dtype not in _NARROW:
        whole: torch.Tensor = torch.linalg.vector_norm(gradient)
        return whole
    pieces = gradient.reshape(-1).split(PIECE_ELEMENTS)
    norms = torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float32) for piece in pieces])
    combined: torch.Tensor = torch.linalg.vector_norm(norms)
    return combined
