"""Forward and backward of one micro-batch."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from headwater.core.errors import NonFiniteError
from headwater.core.loss_function import LossFunction
from headwater.core.precision import autocast
from headwater.core.seeding import derive_seed, seed_generators
from headwater.core.whole_batch import part_of_batch
from headwater.fabric.fabric import Fabric
from headwater.plan.types import Plan
from headwater.store.update import NOT_APPLIED, Update
from headwater.stream.diagnosis import first_non_finite_stage

if TYPE_CHECKING:
    from headwater.stream.executor import Executor

IN_LOSS = "in the loss itself"
"""The `where` of a non-finite loss if every stage's output was finite here. Another rank may know more."""


class MicroBatches:
    """Runs forward and backward of micro-batches on this rank.

    Attributes:
        matmul: returns a context for matrix products.
        precision: returns the autocast context of the plan's precision.

    Args:
        model: the model.
        plan: the plan.
        executor: runs backward.
        fabric: the ranks; each computes a part of every micro-batch.
        device: the device that computes.
        loss_function: computes the loss of a batch.
        seed: seeds the random generator for each micro-batch; `None` leaves the generator alone.
        matmul: returns a context for matrix products.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        executor: Executor,
        fabric: Fabric,
        device: torch.device,
        *,
        loss_function: LossFunction,
        seed: int | None,
        matmul: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._model = model
        self._plan = plan
        self._executor = executor
        self._fabric = fabric
        self._device = device
        self._loss_function = loss_function
        self._seed = seed
        self.matmul = matmul
        self.precision: Callable[[], AbstractContextManager[object]] = nullcontext
        if plan.precision.mixed:
            self.precision = functools.partial(autocast, plan.precision, plan.device)
        # This rank computes its part of a batch in this context; see [Note: the whole batch].
        self._part: Callable[[], AbstractContextManager[object]] = nullcontext
        if fabric.num_csx > 1:
            self._part = functools.partial(part_of_batch, self._gather_parts, fabric.rank)
        self._asks_for_whole = False  # true once the model has asked for values of all ranks' parts

    def train(self, batch: Any, update: Update, index: int, count: int, weight: float | None) -> float:
        """Run forward and backward of a micro-batch. Its gradients are added in the store.

        Args:
            batch: the argument of the loss function.
            update: the step.
            index: number of the micro-batch in the step.
            count: number of micro-batches of the step on each rank.
            weight: of this loss in the loss of the step; 1 / (micro-batches of all ranks) if `None`.

        Returns:
            The loss.

        Raises:
            NonFiniteError: if the loss is not finite, unless `update` skips such steps.
        """
        with self.matmul():
            with self._part():
                loss = self._forward(batch, update.step, index)
            value = self._checked(loss, batch, update, index)
            # The loss is scaled after the check: a scaled loss may overflow where the loss itself is finite.
            if update.loss_scale != 1.0:
                loss = loss * update.loss_scale
            parts = count * self._fabric.num_csx
            if weight is not None:
                loss = loss * weight
            elif parts > 1:
                loss = loss / parts
            with self._part():
                self._executor.backward(loss, last=index == count - 1)
        return value

    def take_part(self, batch: Any, update: Update, index: int) -> None:
        """Run a forward only for other ranks, which need values of this rank's rows. Its loss is not used."""
        if self._asks_for_whole:
            with torch.no_grad(), self._part(), self.matmul():
                self._forward(batch, update.step, index)

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch. The caller must be in the contexts `precision` and `matmul`."""
        on_device = tree_map_only(torch.Tensor, operator.methodcaller("to", self._device), batch)
        return self._loss_function(self._model, on_device)

    def _forward(self, batch: Any, step: int, index: int) -> torch.Tensor:
        if self._seed is not None:
            # The number is unique among all ranks: each rank must draw different dropout masks.
            number = self._fabric.rank * self._plan.num_micro_batches + index
            seed_generators(derive_seed(self._seed, "micro_batch", step, number))
        with self.precision():
            return self.loss(batch)

    def _checked(self, loss: torch.Tensor, batch: Any, update: Update, index: int) -> float:
        # This waits for the device, once for each micro-batch.
        value = loss.item()
        if torch.isfinite(loss) or update.skip_non_finite:
            return value
        stages = self._plan.trace.stages
        with torch.no_grad():
            # With a seed the second forward draws the same masks, and fails at the same stage.
            first = first_non_finite_stage(
                self._model, stages, lambda: self._forward(batch, update.step, index)
            )
        raise NonFiniteError(
            f"the loss of step {update.step} is {value}",
            where=f"stage {first!r}, the first with such an output" if first else IN_LOSS,
            remedy=f"lower the learning rate, clip gradients, or look at the data of this step{NOT_APPLIED}",
        )

    def _gather_parts(self, own: torch.Tensor) -> list[torch.Tensor]:
        self._asks_for_whole = True
        return self._fabric.gather_tensors(own)
