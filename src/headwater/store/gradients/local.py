"""The gradients of a single rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import final

import torch

from headwater.core.stage import ParamKey, StageSpec
from headwater.store.gradients.buffer import GradientBuffer
from headwater.store.gradients.buffered import BufferedSums
from headwater.store.gradients.norms import NARROW, gradient_norm
from headwater.store.gradients.port import EditableGradients, Gradients
from headwater.store.gradients.status import GradientStatus
from headwater.store.sparse import add


@final
class LocalGradients(EditableGradients):
    """The gradients of a run with one rank: added up as they arrive, in the tensors that autograd made.

    The gradients of a stage are all in host memory, or all on the device; they are added up there.

    Args:
        stages: the stages.
        buffer: where sums wait.
        sum_dtype: see `ParamSpec.sum_dtype`. `None` keeps the gradient's own dtype until a second one is
            added, which is exact if a step has one micro-batch.
    """

    is_shared = False

    def __init__(
        self, stages: Sequence[StageSpec], buffer: GradientBuffer, sum_dtype: torch.dtype | None
    ) -> None:
        self.status = GradientStatus()
        self._stages = stages
        self._sum_dtype = sum_dtype
        self._sums = BufferedSums(stages, buffer)
        self._num_trained = [sum(spec.requires_grad for spec in stage.params) for stage in stages]

    def add(
        self, key: ParamKey, gradient: torch.Tensor, *, last: bool, norm: torch.Tensor | None = None
    ) -> bool:
        # The gradient is dropped: see `GradientStatus.consumed`.
        if key in self.status.consumed:
            return False
        stage, param = key
        opened = self._sums.open(stage)
        before = opened.gradients[param]
        # With `backward(create_graph=True)` the loop may differentiate the gradients that it reads.
        recorded = None
        spec = self._stages[stage].params[param]
        dtype = gradient.dtype if self._sum_dtype is None else spec.sum_dtype(self._sum_dtype)
        if gradient.requires_grad:
            recorded = _recorded(self._sums, key, before, gradient, dtype)
        total = self._added(key, before, gradient, dtype) if recorded is None else recorded.detach()
        opened.gradients[param] = total
        if total is not before or total.is_sparse:  # an addition gives a sparse tensor other memory
            self._sums.stop_lending(key)
        if recorded is not None:
            self._sums.note_lent(key, recorded)
        opened.received.add(param)
        self.status.arrive(key, is_sparse=total.is_sparse)
        # The norm is measured now, while the sum is in the cache. So a sum on disk is not read again for it.
        if last:
            is_whole = before is None and total.dtype == gradient.dtype
            self.status.measure(key, norm if norm is not None and is_whole else _norm_on_host(total))
        if len(opened.received) == self._num_trained[stage]:
            self._sums.settle(stage)  # on disk this frees the memory of the stage's gradients
        return False

    def _added(
        self, key: ParamKey, total: torch.Tensor | None, gradient: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the sum of a gradient and those before. A first gradient is converted to `dtype`."""
        if total is None:
            return gradient.detach() if gradient.dtype == dtype else gradient.to(dtype)
        if total.dtype in NARROW:
            total = total.to(self._stages[key[0]].params[key[1]].dtype)
        return add(total, gradient, in_place=self._sums.may_change(key))

    def drain(self) -> None:
        pass

    def end_micro_batch(self) -> None:
        self._sums.settle_all()

    def complete(self) -> None:
        self._sums.settle_all()

    def norm(self, keys: Sequence[ParamKey]) -> torch.Tensor:
        missing = {key for key in keys if key not in self.status.norms or self._sums.was_lent(key)}
        for stage in sorted({stage for stage, _ in missing}):
            # The stage may be open: a sum of it may have been read or replaced during the backward.
            self._sums.settle(stage)
            for param, total in enumerate(self._sums.look(stage)):
                if total is not None and (stage, param) in missing:
                    self.status.measure((stage, param), _norm_on_host(total))
        return self.status.norm(keys)

    def commit(self, keys: Iterable[ParamKey], stages: Collection[int]) -> None:
        taken = list(keys)
        for key in taken:
            # The sum is saved before the loan ends, which may replace it by a copy.
            self._sums.save(key[0])
            self._sums.end_loan(key)
        # This loop follows all copies: if memory is missing for a copy, no sum is taken.
        for key in taken:
            self.status.leave(key)
        self.status.first_bad = None

    def take(self, stage: int) -> Gradients | None:
        return self._sums.take(stage)

    def put_back(self, stage: int, gradients: Gradients) -> None:
        if any(gradient is not None for gradient in gradients):
            self._sums.put(stage, gradients)

    def drop(self, key: ParamKey) -> None:
        self.status.drop_consumed(key)
        self._sums.stop_lending(key)
        if key in self.status.present:
            self._sums.drop(key)
            self.status.leave(key)

    def discard(self) -> None:
        for key in list(self.status.present):
            self.drop(key)
        self.status.drop_all_consumed()
        self.status.first_bad = None

    def borrow(self, key: ParamKey) -> torch.Tensor | None:
        if key not in self.status.present:
            return None
        return self._sums.lend(key, self.status.present)

    def multiply(self, key: ParamKey, factor: Callable[[], torch.Tensor]) -> None:
        total = self.borrow(key)
        if total is not None:
            total.mul_(factor().to(total.device))

    def replace(self, key: ParamKey, gradient: torch.Tensor) -> None:
        stage, param = key
        self._sums.open(stage).gradients[param] = gradient.detach()
        self._sums.stop_lending(key)
        # As in plain PyTorch, the loop's tensor is the gradient from now on.
        self._sums.note_lent(key, gradient)
        self.status.arrive(key, is_sparse=gradient.is_sparse)
        self.status.drop_consumed(key)

    def loop_tensor(self, key: ParamKey, like: torch.Tensor) -> torch.Tensor | None:
        return self._sums.loans.loop_tensor(key, like)

    def remember(self, keys: Collection[ParamKey] | None = None) -> None:
        self._sums.settle_all()
        self.forget()
        self.status.remember(keys)
        self._sums.begin_undoable({stage for stage, _ in self.status.remembered})

    def restore(
        self, taken: Collection[ParamKey], waiting: Collection[ParamKey], undone: Collection[ParamKey]
    ) -> None:
        self._sums.settle_all()
        before = self.status.remembered.difference(taken, waiting)
        self._sums.restore(before.union(waiting))
        self.status.restore({*taken, *waiting})
        self.forget()

    def forget(self) -> None:
        self.status.forget()
        self._sums.forget()

    def close(self) -> None:
        # Norms of a step that failed may be in memory that a `HostArena` has lent.
        self.status.leave_all()
        self._sums.close()


def _norm_on_host(gradient: torch.Tensor) -> torch.Tensor:
    return gradient_norm(gradient).to("cpu")


def _recorded(
    sums: BufferedSums,
    key: ParamKey,
    total: torch.Tensor | None,
    gradient: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the sum of a gradient that has a graph and of the gradients before, with its graph."""
    if total is None:
        return gradient.to(dtype)
    before = sums.loans.loop_tensor(key, total)
    return add(total if before is None else before, gradient, in_place=False)
