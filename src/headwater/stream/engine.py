"""The streaming engine: trains a model with a plan and an optimizer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headwater.core.errors import ConfigError, StreamError
from headwater.core.kernels import context_of
from headwater.core.loss_function import LossFunction, call_model
from headwater.core.module_parameters import named_parameters_of
from headwater.core.stage import ParamKey, StageSpec
from headwater.core.tensor_memory import return_free_memory
from headwater.fabric.fabric import ALONE, Fabric
from headwater.optim.spec import OptimizerSpec
from headwater.plan.types import Plan
from headwater.plan.writes import refuse_assignments_after_use
from headwater.store.layout import RETURNED_BYTES
from headwater.store.named import keys_by_name
from headwater.store.pieces import PieceState
from headwater.store.replicas import checksum, refuse_unequal_replicas
from headwater.store.rule import UpdateRule
from headwater.store.rules import UpdateRules
from headwater.store.store import WeightStore
from headwater.store.update import Update
from headwater.stream.binding import Binder, OnLeave
from headwater.stream.buffers import Buffers
from headwater.stream.compilation import compile_stages
from headwater.stream.device_errors import device_errors
from headwater.stream.devices import make_device
from headwater.stream.executor import Executor
from headwater.stream.gradient_nodes import refuse_lost_hooks
from headwater.stream.micro_batch import MicroBatches
from headwater.stream.options import DEFAULTS, EngineOptions, Initial
from headwater.stream.step import StepReport, TrainStep
from headwater.stream.storage import make_store, make_weights
from headwater.stream.store_settings import StoreSettings
from headwater.stream.unseen_writes import UnseenWrites

if TYPE_CHECKING:
    from headwater.stream.device import Device
    from headwater.stream.weights import Weights


class Engine:
    """Trains one model by weight streaming: weights stay in the store, and are copied to the device by stage.

    Args:
        model: any module; parameters may be on the meta device if `initial` is given. The engine owns its
            parameters from now on: outside a forward their values are in the store, and are read from there.
        plan: the plan of `headwater.plan`.
        optimizer: the optimizer, or update rules.
        initial: a function that returns initial values; if not given, the present values of the model's
            parameters. It may also be the weight store of an engine that was detached from the model: then
            values, gradients and optimizer state are those of the store. The plan of that engine must have
            the same `StoreSettings`, and its optimizer the same state tensors.
        seed: before each micro-batch, the random generator is seeded with a number derived from this seed,
            the step and the micro-batch. `None` leaves the generator of the process unchanged.
        loss_function: returns the loss of a batch; the model itself if not given.
        fabric: the ranks that train together, each on a part of every batch.
        options: further settings.

    Attributes:
        is_detached: true after `detach`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: OptimizerSpec | UpdateRules,
        *,
        initial: Initial | WeightStore | None = None,
        seed: int | None = None,
        loss_function: LossFunction = call_model,
        fabric: Fabric = ALONE,
        options: EngineOptions = DEFAULTS,
    ) -> None:
        refuse_assignments_after_use(plan.trace.assigned_after_use)
        _refuse_updates(plan, fabric)
        self.fabric, self.model, self.plan = fabric, model, plan
        self._device = make_device(plan.device if fabric.computes else "cpu")
        if initial is None:  # before a parameter gives its values to the store
            _refuse_missing_values(model, plan)
        self.buffers = Buffers(model, self._device.torch_device)
        with ExitStack() as made:  # closed if a later part cannot be made; the weights before the store
            if isinstance(initial, WeightStore):
                self.store = initial
            else:
                settings, order = StoreSettings.of(plan), _parameter_order(model, plan)
                self.store = make_store(settings, _rules(optimizer), self._device, order, fabric, options)
                made.callback(self.store.close)
            weights = make_weights(plan, self.store, self._device, fabric)
            made.callback(weights.close)
            compiling = compile_stages if plan.blocks.compiled else _leave_forwards
            self._restore_forwards = compiling(model, plan.trace.stages)
            made.callback(self._restore_forwards)
            self._binder = _make_binder(model, plan, self.store, self._device, weights)
            self._adopt_all(initial)
            factor = 1 / fabric.size if plan.user_loop else 1.0  # `train_step` divides the loss itself
            self.executor = Executor(
                model,
                plan,
                self.store,
                self._binder,
                weights,
                self._device,
                factor,
            )
            made.callback(self.executor.close)
            batches = self._micro_batches = MicroBatches(
                model,
                plan,
                self.executor,
                fabric,
                self._device.torch_device,
                loss_function=loss_function,
                seed=seed,
                matmul=context_of(plan.kernels, plan.device),
            )
            self._step = TrainStep(self.store, self.executor, self.buffers, batches, fabric)
            self.is_detached = False
            made.pop_all()
        return_free_memory()  # initial values took more memory than a step is allowed to take

    def _adopt_all(self, initial: Initial | WeightStore | None) -> None:
        """Put all parameters at rest. Write their values to the store first, unless it has them already."""
        described = ((param, self.store.spec(key)) for key, param in self._binder.parameters())
        refuse_lost_hooks(described, self._device.torch_device)
        checksums, freed = {}, 0
        for stage in self.store.stages:
            if not isinstance(initial, WeightStore):
                # The store is filled before `adopt`, which frees the present values.
                checksums[stage.name] = self._fill(stage.index, initial)
                freed += stage.slab_bytes
            self._binder.adopt(stage.index)
            if freed >= RETURNED_BYTES:  # otherwise malloc may keep all of them until the store is full
                return_free_memory()
                freed = 0
        if checksums and self.store.ownership.replicated:
            refuse_unequal_replicas(self.fabric, self._device.product, checksums)

    def _fill(self, stage: int, initial: Initial | None) -> int:
        """Write the first values of a stage to the store. Return their checksum if it has replicas."""
        specs = self.store.stages[stage].params
        present = (param.detach() for param in self._binder.stages[stage].params)
        values = list(present) if initial is None else [initial(spec) for spec in specs]
        _refuse_meta(self.store.stages[stage], values)
        for index, (spec, value) in enumerate(zip(specs, values, strict=True)):
            self.store.parameters.masks.begin(
                (stage, index), spec, functools.partial(_on_cpu, value, spec.dtype)
            )
        is_replicated, total = stage in self.store.ownership.replicated, 0

        def fill(piece: PieceState) -> None:
            nonlocal total
            flat = values[piece.param].reshape(-1)
            piece.master.copy_(flat[piece.start : piece.start + piece.master.numel()])
            total = checksum(piece.master, total) if is_replicated else total

        self.store.parameters.write(stage, fill)
        return total

    def train_step(
        self,
        micro_batches: Sequence[Any],
        update: Update,
        before_commit: Callable[[Update], None] = lambda update: None,
        loss_weights: Sequence[float] | None = None,
    ) -> StepReport:
        """Run one optimizer step. Its loss is the weighted mean of the losses of the micro-batches.

        Args:
            micro_batches: the arguments of the loss function, one for each micro-batch. A store rank passes
                the same number of `None`.
            update: step number, learning rate, clipping.
            before_commit: called after all gradients are computed, and before their norm is computed. It may
                change gradients and weights in the store.
            loss_weights: the weight of each micro-batch in the loss; the sum over all ranks is 1. Equal
                weights if not given.

        Returns:
            The report of the step.

        Raises:
            NonFiniteError: if a loss or gradient is not finite, unless `update` says to skip such steps. The
                step is undone.
            StreamError: if a GPU cannot compute the step; see `device_errors`. The step is undone.
            ConfigError: if the plan's updates are in backward, and `update` needs all gradients first.

        With updates in backward an error may leave a part of the step applied; its remedy says so. Then every
        later use of the weights raises `StoreError`. When `before_commit` is called, some stages are updated
        already: it finds only the gradients of the others.
        """
        in_backward = self.store.in_backward
        with _errors(self.plan.device):
            # A retry must not add to the gradients of the step that failed. Some of these may still be on
            # their way from the device, so this comes before the context of the new step.
            self.store.begin_step()
        # `in_backward.step` is outermost, so that errors of a GPU reach it as errors of this package.
        with nullcontext() if in_backward is None else in_backward.step(update), _errors(self.plan.device):
            return self._step.run(micro_batches, update, before_commit, loss_weights)

    def evaluate(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch, computed without gradients. The caller sets train or eval mode."""
        with self.inference():
            return self._micro_batches.loss(batch)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Enter a context for calls of the model, or of its parts, without gradients."""
        with (
            _errors(self.plan.device),
            torch.no_grad(),
            self._micro_batches.matmul(),
            self._micro_batches.precision(),
            self.executor.inference(),
        ):
            yield

    def named_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, master) of every parameter, with pending updates applied; shared ones once."""
        for stage in self.store.stages:
            masters = [torch.empty(spec.shape, dtype=spec.dtype, device="cpu") for spec in stage.params]
            # Read all pieces before the first yield: the stage's lock is held while it is read.
            for piece in self.store.parameters.read(stage.index, states=()):
                flat = masters[piece.param].view(-1)
                flat[piece.start : piece.start + piece.master.numel()].copy_(piece.master)
            yield from zip([spec.name for spec in stage.params], masters, strict=True)

    @property
    def departed(self) -> dict[ParamKey, nn.Parameter]:
        """The parameters that have become plain parameters since this engine was made."""
        return self._binder.departed

    def when_departed(self, action: OnLeave) -> None:
        """Set a function that copies the values of each parameter that becomes a plain one to a device."""
        self._binder.on_leave = action

    def parameters(self) -> Iterator[tuple[ParamKey, nn.Parameter]]:
        """Yield ((stage, index), parameter) for every streamed parameter, even if the model lacks it now."""
        yield from self._binder.parameters()

    def master(self, name: str) -> torch.Tensor:
        """Return a copy of the master of a parameter, with pending updates applied."""
        return self.store.parameters.read_param(keys_by_name(self.store.stages)[name])

    def detach(self) -> None:
        """Remove all hooks, and turn the parameters into plain parameters that hold NaN.

        The store and offloaded activations stay.
        """
        self.is_detached = True
        try:
            # The executor first: its hooks bind the parameters that are released next.
            self.executor.leave()
        finally:
            # This follows the executor, whose recomputed forwards call the compiled ones.
            self._restore_forwards()
            self._binder.release()

    def adopt_again(self) -> None:
        """Make the parameters read from the store again after `detach`.

        Only another engine can stream them after this. A backward through an earlier graph raises an error.
        """
        # `detach` is called once more: an engine that could not be built may have adopted some parameters.
        self.detach()
        self.executor.refuse_backwards()
        for stage in self.store.stages:
            self._binder.adopt(stage.index)

    def hand_over(self, successor: Engine, *, unchanged: bool) -> None:
        """Make `successor` provide the weights for backwards through graphs that were made before `detach`.

        Args:
            successor: the engine that has the model now.
            unchanged: true if the model has the same structure as for this engine.
        """
        self.executor.hand_over(successor.executor, unchanged=unchanged)
        # The executor is not closed: earlier graphs still need its offloaded activations.
        if successor.store is not self.store:
            self.store.close()
        self._device.return_cached()
        return_free_memory()

    def close(self) -> None:
        """Call `detach`, then release memory, threads and files, also if `detach` raises an error."""
        with ExitStack() as closed:
            # Runs last: the memory that the callbacks below free stays in the allocators' caches until then,
            # and no other process could use it.
            closed.callback(return_free_memory)
            closed.callback(self._device.return_cached)
            # The store after the executor, because threads of the executor read it.
            closed.callback(self.store.close)
            closed.callback(self.executor.close)
            if not self.is_detached:
                self.detach()
                # The parameters hold NaN now, and graphs may have saved them.
                self._binder.forget_saved()
                # A graph from before streaming cannot use the former memory of parameters any more.
                self._binder.release()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _rules(optimizer: OptimizerSpec | UpdateRules) -> UpdateRules:
    return optimizer if isinstance(optimizer, UpdateRules) else UpdateRule(optimizer)


def _errors(device: str) -> AbstractContextManager[object]:
    """Return the context in which errors of a device are raised as errors of this package."""
    return nullcontext() if device == "cpu" else device_errors()


def _refuse_updates(plan: Plan, fabric: Fabric) -> None:
    """Raise `ConfigError` if updates cannot run during backward."""
    found = {
        "your own loop": plan.user_loop,
        f"{fabric.num_hosts} hosts": fabric.num_hosts > 1,
        f"{fabric.size - fabric.num_csx} store ranks": fabric.size > fabric.num_csx,
    }
    for name in [name for name, is_found in found.items() if is_found and plan.updates == "in_backward"]:
        raise ConfigError(
            f"updates: in_backward needs a run of a params file on one host without store ranks, got {name}",
            where="updates",
            remedy="write updates: on_fetch",
        )


def _refuse_meta(stage: StageSpec, values: Sequence[torch.Tensor]) -> None:
    """Raise `StreamError` if an initial value of a stage is on the meta device."""
    if any(value.is_meta for value in values):
        raise StreamError(
            f"stage {stage.name!r} is on the meta device: its weights have no values",
            remedy="build the model outside of torch.device('meta'), or give it values first: "
            "headwater.load_pretrained(model, FOLDER); with `Engine`, pass `initial`, which returns them",
        )


def _on_cpu(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to("cpu", dtype)


def _leave_forwards(model: nn.Module, stages: Sequence[StageSpec]) -> Callable[[], None]:
    return lambda: None


def _make_binder(
    model: nn.Module, plan: Plan, store: WeightStore, device: Device, weights: Weights
) -> Binder:
    binder = Binder(
        model,
        store,
        device.torch_device,
        stable=weights.stable,
        writable=frozenset() if plan.precision.mixed else plan.read_in_place,
        written=plan.trace.written,
        repeats=any(policy.is_recomputed for policy in plan.activations),
    )
    binder.watch(UnseenWrites(device))
    # On another device the backward uses copies of the old weights, or asks the store for a stage.
    if store.in_backward is not None and plan.device == "cpu":
        store.in_backward.on_hand_over = binder.note_update
    return binder


def _refuse_missing_values(model: nn.Module, plan: Plan) -> None:
    for spec in plan.trace.stages:
        _refuse_meta(spec, [model.get_parameter(param.name) for param in spec.params])


def _parameter_order(model: nn.Module, plan: Plan) -> list[tuple[int, int]]:
    # The model's order, not that of stages: the order of a sum decides the last bits of the norm.
    keys = keys_by_name(plan.trace.stages)
    return [keys[name] for name, _ in named_parameters_of(model)]
