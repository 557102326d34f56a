"""A model, a plan and an optimizer made into something that trains: the face of the streaming engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from headwater.core.buffers import return_pages
from headwater.core.errors import StreamError
from headwater.core.stage import ParamKey, ParamSpec
from headwater.fabric.fabric import ALONE, Fabric
from headwater.optim.spec import OptimizerSpec
from headwater.plan.trace import LossFunction, call_model
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
from headwater.stream.executor import Executor
from headwater.stream.matmul import FastMatmul
from headwater.stream.micro_batch import MicroBatches
from headwater.stream.step import StepReport, TrainStep
from headwater.stream.storage import make_store, make_weights

Initial = Callable[[ParamSpec], torch.Tensor]
"""Gives the initial value of a parameter."""


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
        self._device = make_device(plan.device if fabric.computes else "cpu")
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
        self._micro_batches = MicroBatches(
            model,
            plan,
            self.executor,
            fabric,
            self._device.torch_device,
            loss_function=loss_function,
            seed=seed,
            matmul=FastMatmul if fast_matmul and plan.device == "cpu" else nullcontext,
        )
        self._step = TrainStep(self.store, self.executor, self.buffers, self._micro_batches, fabric)
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
        return self._step.run(micro_batches, update, amend, shares)

    def evaluate(self, batch: Any) -> torch.Tensor:
        """The loss of a batch, without gradients; train or eval mode is the caller's business."""
        with self.inference():
            return self._micro_batches.loss(batch)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Within it the model computes without gradients; its forward may be called in any way."""
        self.executor.begin()
        with torch.no_grad(), self._micro_batches.matmul(), self._micro_batches.precision():
            yield

    def named_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, fp32 master) of every parameter, up to date, a stage at a time; aliases are left out."""
        for stage in self.store.stages:
            masters = [torch.empty(spec.shape, dtype=spec.dtype) for spec in stage.params]
            # Read to the end before anything is handed out: reading holds the stage.
            for piece in self.store.parameters.read(stage.index, with_states=False):
                flat = masters[piece.param].view(-1)
                flat[piece.start : piece.start + piece.master.numel()].copy_(piece.master)
            yield from zip([spec.name for spec in stage.params], masters, strict=True)

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
