"""One training step, from the batches to the commit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from headwater.core.errors import HeadwaterError, NonFiniteError
from headwater.core.recorder import COMPUTE, GRADIENT, RECORDER
from headwater.fabric.fabric import Fabric
from headwater.store.store import WeightStore
from headwater.store.update import Update
from headwater.stream.buffers import Buffers
from headwater.stream.micro_batch import IN_LOSS, MicroBatches
from headwater.stream.weights import StreamStatistics

if TYPE_CHECKING:
    from headwater.stream.executor import Executor


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The result of one training step.

    Attributes:
        loss: mean loss of the micro-batches.
        gradient_norm: global 2-norm before clipping.
        applied: false if the step was skipped because its gradient was not finite.
        statistics: counts of the data that the step moved.
    """

    loss: float
    gradient_norm: float
    applied: bool
    statistics: StreamStatistics


class TrainStep:
    """Runs training steps on this rank. All ranks run the same steps together.

    Args:
        store: sums the gradients and commits the update.
        executor: streams the weights.
        buffers: the model's buffers; a failed step leaves them unchanged.
        micro_batches: computes the losses.
        fabric: the ranks.
    """

    def __init__(
        self,
        store: WeightStore,
        executor: Executor,
        buffers: Buffers,
        micro_batches: MicroBatches,
        fabric: Fabric,
    ) -> None:
        self._store = store
        self._executor = executor
        self._buffers = buffers
        self._micro_batches = micro_batches
        self._fabric = fabric

    def run(
        self,
        batches: Sequence[Any],
        update: Update,
        before_commit: Callable[[Update], None],
        loss_weights: Sequence[float] | None,
    ) -> StepReport:
        """Run one step, after `WeightStore.begin_step`; see `Engine.train_step`."""
        with RECORDER.span(COMPUTE), ExitStack() as unless_applied:
            statistics = self._executor.begin(len(batches))
            # The forward may put values into BatchNorm statistics that are not finite.
            unless_applied.callback(self._buffers.remember())
            loss, refusal = self._accumulate(batches, update, loss_weights)
            # This is the first collective: all ranks raise here, or none does, so none waits for another.
            losses = self._gather_losses(loss, refusal, update)
            before_commit(update)
            with RECORDER.span(GRADIENT):
                committed = self._store.commit(update)
            if committed.applied:
                unless_applied.pop_all()
        return StepReport(
            loss=sum(losses) / self._fabric.num_csx,
            gradient_norm=committed.gradient_norm,
            applied=committed.applied,
            statistics=statistics,
        )

    def _accumulate(
        self, batches: Sequence[Any], update: Update, loss_weights: Sequence[float] | None
    ) -> tuple[float, NonFiniteError | None]:
        """Run forward and backward of every micro-batch on this rank.

        A rank whose loss is not finite cannot raise at once, because the other ranks would wait for it. It
        computes no more gradients, but takes part in the step. Then `_gather_losses` raises its error on all
        ranks.

        Returns:
            The mean loss and None, or NaN and the error.
        """
        total, count = 0.0, len(batches)
        refusal: NonFiniteError | None = None
        for index, batch in enumerate(batches):
            weight = None if loss_weights is None else loss_weights[index]
            if not self._fabric.computes:
                self._store.end_micro_batch()
                continue
            if refusal is None:
                try:
                    loss = self._micro_batches.train(batch, update, index, count, weight)
                except NonFiniteError as error:
                    # A single rank keeps no other rank waiting.
                    if self._fabric.size == 1:
                        raise
                    refusal = error
                else:  # `Executor.backward` has called `end_micro_batch`
                    total += loss if weight is None else loss * weight * count * self._fabric.num_csx
                    continue
            else:
                # Other ranks may wait for this rank's rows of the whole batch.
                self._micro_batches.take_part(batch, update, index)
            self._store.end_micro_batch()
        return (total / count if refusal is None else math.nan), refusal

    def _gather_losses(self, loss: float, refusal: NonFiniteError | None, update: Update) -> list[float]:
        """Gather and return the losses of all ranks. Raise on every rank if one of the losses is not finite.

        Raises:
            NonFiniteError: the same on every rank, if the loss of one of them is not finite.
        """
        losses = self._fabric.gather(loss)
        if not (update.skip_non_finite or all(map(math.isfinite, losses))):
            # Objects are gathered only in this branch, because that is slow. All ranks come here together.
            refusals = self._fabric.gather_objects(refusal, HeadwaterError | None)
            errors = [error for error in refusals if error is not None]
            # Prefer the error of a rank that knows the stage to that of a rank that knows only its loss.
            raise next((error for error in errors if error.where != IN_LOSS), errors[0])
        return losses
