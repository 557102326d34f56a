"""A model, a plan and an optimizer made into something that trains: the face of the streaming engine."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from headwater.core.buffers import return_pages
from headwater.core.errors import HeadwaterError, NonFiniteError, StreamError
from headwater.core.seeding import derive_seed
from headwater.core.stage import ParamKey, ParamSpec
from headwater.core.whole_batch import part_of_batch
from headwater.fabric.fabric import ALONE, Fabric
from headwater.optim.spec import OptimizerSpec
from headwater.plan.trace import LossFunction, autocast, call_model
from headwater.plan.types import Plan
from headwater.plan.writes import refuse_assignments_after_use
from headwater.store.named import keys_by_name
from headwater.store.pieces import PieceState
from headwater.store.rule import UpdateRule, UpdateRules
from headwater.store.update import Update
from headwater.stream.binding import Binder
from headwater.stream.buffers import Buffers
from headwater.stream.compilation import compile_stages
from headwater.stream.device import make_device
from headwater.stream.diagnosis import first_non_finite_stage
from headwater.stream.executor import Executor
from headwater.stream.matmul import FastMatmul
from headwater.stream.storage import make_store, make_weights
from headwater.stream.weights import StreamStatistics

Initial = Callable[[ParamSpec], torch.Tensor]
"""Gives the initial value of a parameter."""


_IN_LOSS = "in the loss itself"
"""Where a loss stops being finite if no stage did; of a whole batch another rank may know better."""


@dataclasses.dataclass(frozen=True)
class StepReport:
    """What one training step did.

    Attributes:
        loss: mean loss of the micro-batches.
        gradient_norm: global 2-norm before clipping.
        applied: `False` if the step was skipped because its gradient was not finite.
        statistics: what it streamed.
        step_s: seconds it took.
    """

    loss: float
    gradient_norm: float
    applied: bool
    statistics: StreamStatistics
    step_s: float


class Engine:
    """Trains a model by weight streaming.

    Args:
        model: any module; parameters may be on the meta device if `initial` is given. The engine owns its
            parameters from here on: outside a forward their values are in the store, and read from there.
        plan: what `headwater.plan` decided.
        optimizer: how parameters are updated.
        initial: initial values; what the model's parameters hold if not given.
        seed: seeds the generator anew for each micro-batch, keyed by step and micro-batch; `None` leaves the
            ambient generator alone.
        loss_function: computes the loss of a batch; the model itself if not given.
        fast_matmul: let fp32 matrix products on the CPU differ from torch's own by rounding, where that is
            faster.
        compile_blocks: compile the forward of repeated stages with `torch.compile`.
        verify_disk: compare what is read of the disk tier with checksums of what was written.
        fabric: the ranks that train together, each on a part of every batch.
        own_loop: whether a loop of the user's own trains, and not `train_step`; of several ranks each gives
            the gradient of its part's loss then, and these are averaged.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: OptimizerSpec | UpdateRules,
        *,
        initial: Initial | None = None,
        seed: int | None = None,
        loss_function: LossFunction = call_model,
        fast_matmul: bool = False,
        compile_blocks: bool = False,
        verify_disk: bool = False,
        fabric: Fabric = ALONE,
        own_loop: bool = False,
    ) -> None:
        refuse_assignments_after_use(plan.trace.assigned_after_use)
        self.fabric = fabric
        self.model = model
        self.plan = plan
        self._seed = seed
        self._loss_function = loss_function
        self._device = make_device(plan.device if fabric.computes else "cpu")
        self._matmul: Callable[[], AbstractContextManager[object]] = nullcontext
        if fast_matmul and plan.device == "cpu":
            self._matmul = FastMatmul
        if compile_blocks:
            compile_stages(model, plan.trace.stages)
        order = _parameter_order(model, plan)
        rule = optimizer if isinstance(optimizer, UpdateRules) else UpdateRule(optimizer)
        self.store = make_store(plan, rule, self._device, order, verify_disk, fabric, own_loop)
        weights = make_weights(plan, self.store, self._device, fabric)
        self._binder = Binder(
            model,
            self.store,
            self._device.torch_device,
            stable=weights.stable,
            writable=plan.in_place and not plan.precision.mixed,
            written=plan.trace.written,
        )
        for stage in range(len(plan.trace.stages)):
            self._fill(stage, initial)
            self._binder.adopt(stage)
        self.buffers = Buffers(model, self._device.torch_device)
        share = 1 / fabric.size if own_loop else 1.0
        self.executor = Executor(model, plan, self.store, self._binder, weights, share)
        self._asks_for_whole = False  # the model, of all ranks
        self._detached = False
        return_pages()  # initial values took more memory than a step may

    def _fill(self, stage: int, initial: Initial | None) -> None:
        specs = self.store.stages[stage].params
        values = self._binder.values(stage) if initial is None else [initial(spec) for spec in specs]
        if any(value.is_meta for value in values):
            raise StreamError(
                f"stage {self.store.stages[stage].name!r} is on the meta device: its weights have no values",
                remedy="pass `initial`, which gives them",
            )

        def fill(piece: PieceState) -> None:
            flat = values[piece.param].reshape(-1)
            piece.master.copy_(flat[piece.start : piece.start + piece.master.numel()])

        self.store.parameters.write(stage, fill)

    def train_step(
        self,
        micro_batches: Sequence[Any],
        update: Update,
        amend: Callable[[Update], None] = lambda update: None,
        shares: Sequence[float] | None = None,
    ) -> StepReport:
        """One optimizer step; the loss is the mean over its micro-batches.

        Args:
            micro_batches: what the loss function takes, one after the other; of a store rank as many `None`.
            update: step number, learning rate, clipping.
            amend: called when all gradients are there and before they are measured; it may change them, and
                the weights, through the store.
            shares: of each micro-batch in the loss; those of all ranks together make 1. Equal ones if not
                given.

        Raises:
            NonFiniteError: if a loss or gradient is not finite, unless `update` says to skip such steps; the
                step leaves no trace.
        """
        start = time.perf_counter()
        self.store.begin_step()
        statistics = self.executor.begin(len(micro_batches))
        with self.buffers.transaction() as undo:
            loss, refused = self._micro_batches(micro_batches, update, shares)
            losses = self.fabric.gather(loss)
            if not (update.skip_non_finite or all(map(math.isfinite, losses))):
                every = self.fabric.gather_objects(refused, HeadwaterError | None)
                errors = [error for error in every if error is not None]
                raise next((e for e in errors if e.where != _IN_LOSS), errors[0])
            amend(update)
            committed = self.store.commit(update)
            if not committed.applied:
                undo()
        return StepReport(
            loss=sum(losses) / self.fabric.num_csx,
            gradient_norm=committed.gradient_norm,
            applied=committed.applied,
            statistics=statistics,
            step_s=time.perf_counter() - start,
        )

    def _micro_batches(
        self, micro_batches: Sequence[Any], update: Update, shares: Sequence[float] | None
    ) -> tuple[float, NonFiniteError | None]:
        """Forward and backward of all on this rank.

        Returns:
            The mean of their losses. NaN, and the error, if one is not finite and may not be: the other ranks
            must hear of it where they listen, so this one goes on with them to there.
        """
        total, count = 0.0, len(micro_batches)
        refused: NonFiniteError | None = None
        for index, batch in enumerate(micro_batches):
            share = None if shares is None else shares[index]
            if refused is None:
                try:
                    with self._matmul():
                        loss = self._micro_batch(batch, update, index, count, share)
                except NonFiniteError as error:
                    if self.fabric.size == 1:
                        raise
                    refused = error
                else:
                    total += loss if share is None else loss * share * count * self.fabric.num_csx
                    continue  # its backward has ended it for the store
            elif self._asks_for_whole:  # the other ranks do
                with torch.no_grad(), self._of_part(), self._matmul():
                    self._forward(batch, update.step, index)
            self.store.end_micro_batch()
        return (total / count if refused is None else math.nan), refused

    def _micro_batch(self, batch: Any, update: Update, index: int, count: int, share: float | None) -> float:
        """Forward and backward of one micro-batch of `count` on this rank; gives its loss, a store rank 0."""
        if not self.fabric.computes:
            self.store.end_micro_batch()
            return 0.0
        with self._of_part():
            loss = self._forward(batch, update.step, index)
        value = self._checked(loss, batch, update, index)
        if update.loss_scale != 1.0:
            loss = loss * update.loss_scale
        parts = count * self.fabric.num_csx
        if share is not None:
            loss = loss * share
        elif parts > 1:
            loss = loss / parts
        with self._of_part():
            self.executor.backward(loss, last=index == count - 1)
        return value

    def _of_part(self) -> AbstractContextManager[None]:
        """Surrounds what this rank computes of a batch; see [Note: the whole batch]."""
        if self.fabric.num_csx == 1:
            return nullcontext()
        return part_of_batch(self._gather_parts, self.fabric.rank)

    def _gather_parts(self, own: torch.Tensor) -> list[torch.Tensor]:
        self._asks_for_whole = True
        return self.fabric.gather_tensors(own)

    def _forward(self, batch: Any, step: int, index: int) -> torch.Tensor:
        if self._seed is not None:
            number = self.fabric.rank * self.plan.num_micro_batches + index
            torch.manual_seed(derive_seed(self._seed, "micro_batch", step, number))
        with autocast(self.plan.precision, self.plan.device):
            return self._loss_function(self.model, self._to_device(batch))

    def _checked(self, loss: torch.Tensor, batch: Any, update: Update, index: int) -> float:
        value = loss.item()
        if not torch.isfinite(loss) and not update.skip_non_finite:
            stages = self.plan.trace.stages
            with torch.no_grad():
                first = first_non_finite_stage(
                    self.model, stages, lambda: self._forward(batch, update.step, index)
                )
            raise NonFiniteError(
                f"the loss of step {update.step} is {value}",
                where=f"stage {first!r} first" if first else _IN_LOSS,
                remedy="lower the learning rate, clip gradients, or look at the data of this step; "
                "the step was not applied",
            )
        return value

    def evaluate(self, batch: Any) -> torch.Tensor:
        """The loss of a batch, without gradients; train or eval mode is the caller's business."""
        with self.inference():
            return self._loss_function(self.model, self._to_device(batch))

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Within it the model computes without gradients; its forward may be called in any way."""
        self.executor.begin()
        with torch.no_grad(), self._matmul(), autocast(self.plan.precision, self.plan.device):
            yield

    def named_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 master) of every parameter, up to date, a stage at a time; aliases are left out."""
        for stage in self.store.stages:
            yield from self._masters_of(stage.index)

    def _masters_of(self, stage: int) -> Iterator[tuple[str, torch.Tensor]]:
        params = self.store.stages[stage].params
        masters = [torch.empty(spec.shape, dtype=spec.dtype) for spec in params]
        for piece in self.store.parameters.read(
            stage, with_states=False
        ):  # to its end: it holds the stage meanwhile
            flat = masters[piece.param].view(-1)
            flat[piece.start : piece.start + piece.master.numel()].copy_(piece.master)
        yield from zip([spec.name for spec in params], masters, strict=True)

    @property
    def departed(self) -> dict[ParamKey, nn.Parameter]:
        """The parameters that have become plain ones since this engine was made."""
        return self._binder.departed

    def when_departed(self, action: Callable[[ParamKey, nn.Parameter], None]) -> None:
        """Call `action` with each parameter that becomes a plain one; it copies its values out."""
        self._binder.on_leave = action

    def parameters(self) -> Iterator[tuple[ParamKey, nn.Parameter]]:
        """Yield every parameter with its place in the store, whatever the model has become."""
        for stage, index, param in self._binder.parameters():
            yield (stage, index), param

    def _to_device(self, batch: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda t: t.to(self._device.torch_device), batch)

    def master(self, name: str) -> torch.Tensor:
        """Return the master of a parameter, up to date."""
        return self.store.parameters.read_param(keys_by_name(self.store.stages)[name])

    def detach(self) -> None:
        """Leave the model, whose parameters then hold NaN; the store stays, and what moved out for graphs."""
        self._detached = True
        self.executor.leave()
        self._binder.release()

    def hand_over(self, successor: Engine, *, unchanged: bool) -> None:
        """Make `successor` provide the weights for backward graphs of forwards that ran here before `detach`.

        Args:
            successor: the engine that has the model now.
            unchanged: whether the model has the structure that it had here.
        """
        self.executor.hand_over(successor.executor, unchanged=unchanged)
        self.store.close()

    def close(self) -> None:
        """Leave the model, and give back memory, threads and files."""
        if not self._detached:
            self.detach()
        self.executor.close()
        self.store.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _parameter_order(model: nn.Module, plan: Plan) -> list[tuple[int, int]]:
    keys = keys_by_name(plan.trace.stages)
    return [keys[name] for name, _ in model.named_parameters()]
