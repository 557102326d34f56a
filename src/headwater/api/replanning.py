"""Makes a new plan for a model in a user's loop: runs a dry run, plans, and builds an engine."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, final

import torch
from torch import nn
from torch.nn.utils import parametrize

from headwater.api.calls import Call, asked_precision, stand_in_loss
from headwater.api.engine_swap import CurrentEngine, Predecessor
from headwater.api.references import warn_of_references
from headwater.api.same_model import check_same_model
from headwater.api.updaters import Updaters, live_optimizers
from headwater.api.watcher import Structure, refuse_shared_memory
from headwater.core.copies import apart
from headwater.core.empty import settle_lazy_parameters
from headwater.core.precision import Precision
from headwater.core.seeding import drawing_devices
from headwater.core.stage import ParamSpec
from headwater.fabric.membership import current
from headwater.plan.division import divisions
from headwater.plan.partition import Partition, find_stages
from headwater.plan.trace import trace_step
from headwater.plan.types import Trace
from headwater.plan.writes import refuse_assignments_after_use
from headwater.stream.at_rest import values_of
from headwater.stream.engine import Engine
from headwater.stream.saved_tensors import apart_from_hooks

if TYPE_CHECKING:
    from headwater.api.planner import Planner


class PrecisionWarning(UserWarning):
    """Warns that weights change from bf16 or fp16 to fp32, because a call of the model was not autocast."""


@final
class Replanning:
    """Makes plans that serve a call of a model, and moves the weights to an engine with the plan.

    Attributes:
        is_running: true during a dry run.
        knows_training: true after a dry run in training mode.
        trained: names of the parameters that the plan trains. A parameter that was trained once stays among
            them, because loops such as GANs freeze one model while they train another.

    Args:
        current_engine: the engine of the model.
        planner: makes the plans.
    """

    def __init__(self, current_engine: CurrentEngine, planner: Planner) -> None:
        self._current = current_engine
        self._planner = planner
        self._was_planned = False
        self.is_running = False
        self.knows_training = False
        self.trained: frozenset[str] = frozenset()

    @property
    def device(self) -> str:
        """The device that computes: `cpu` or `cuda`."""
        return self._planner.device

    def plan(
        self, call: Call, precision: Precision | None, *, only_look: bool, in_fp32: bool = False
    ) -> None:
        """Make a plan that serves a call of the model, and move the weights to a new engine.

        Args:
            call: the arguments of the call.
            precision: the precision of the run; that of autocast if not given.
            only_look: keep the plan if the forward changes the same weights as in the plan's dry run.
            in_fp32: stream weights in fp32 from now on, whatever the precision was.
        """
        now, model = self._current, self._current.model
        refuse_shared_memory(model)
        # Read now what reads from a store: later, parameters may not have their values when they are read.
        settle_lazy_parameters(model, lambda param: values_of(param) is not None)
        if now.engine is None:
            now.fabric = current()
            if not self._was_planned:  # later, the traceback of a failed dry run may hold such tensors
                warn_of_references(model.named_parameters())
            self._was_planned = True
        old_names = now.old_names()
        if current().size > 1:
            check_same_model(current(), model, () if now.engine is None else old_names)
        updaters = now.updaters.renamed(old_names)
        _note_live(model, updaters)
        kept = now.still_streamed(old_names)
        # Asked before the dry run, which replaces forwards.
        unchanged = now.structure.is_current and len(kept) == len(old_names)
        trained = trained_names(model).union(new for new, old in old_names.items() if old in self.trained)
        if now.engine is not None:
            precision = Precision() if in_fp32 else now.engine.plan.precision
        if in_fp32:
            _warn_of_fp32()
            unchanged = False  # graphs of earlier forwards refer to weights in the other dtype
        precision = precision or asked_precision(self.device)
        with self._dry_run(trained):
            self._planner.stop_early(model, call, precision)
            traces = self._traces(apart(call), precision, kept, inference=not trained)
            trace = next(traces)
            refuse_assignments_after_use(trace.assigned_after_use)
            self.knows_training |= model.training
            if only_look and now.engine and trace.written == now.engine.plan.trace.written:
                now.structure = Structure(model)
                return
            before = None
            if now.engine is not None:
                before = Predecessor(now.engine.plan, unchanged and now.updates_as(updaters))
            plan = self._planner.plan(trace, traces, precision, updaters, now.fabric, before)
            now.replace(plan, updaters, kept, unchanged=unchanged)
            self.trained = trained

    @contextmanager
    def _dry_run(self, trained: Collection[str]) -> Iterator[None]:
        """Enter a context for a dry run. At its end, restore everything that the user's loop can see.

        Args:
            trained: names of the parameters that require gradients in it.
        """
        self.is_running = True
        try:
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                apart_from_hooks(),
                _without_cached_parametrizations(),
                _unfrozen(self._current.model, trained),
                torch.random.fork_rng(devices=drawing_devices()),  # the user's random state must not change
            ):
                yield
        finally:
            self.is_running = False

    def _traces(
        self, call: Call, precision: Precision, old_names: Mapping[str, str], *, inference: bool
    ) -> Iterator[Trace]:
        """Run the model on fake tensors, and yield the trace; then those with ever smaller stages."""
        model, engine = self._current.model, self._current.engine
        partition = find_stages(model, precision)
        if engine is not None:
            engine.store.flush()  # no update must meet fake tensors
            in_fp32 = precision != engine.plan.precision
            partition = _with_masters_of(engine, partition, old_names, in_fp32=in_fp32)
        divided = engine is not None and self._current.structure.is_current and engine.plan.trace.members
        least = len(engine.plan.trace.stages) if engine is not None and divided else 0
        for each in _at_least(least, chain((partition,), divisions(model, partition))):
            with nullcontext() if engine is None or engine.is_detached else engine.executor.paused():
                trace = trace_step(
                    model,
                    call,
                    precision,
                    loss_function=stand_in_loss,
                    partition=each,
                    inference=inference,
                    device=self.device,
                )
            yield trace


def _at_least(num_stages: int, partitions: Iterator[Partition]) -> Iterator[Partition]:
    """Yield the partitions with at least this number of stages, or the last one if none has.

    So blocks that were divided once stay divided, and graphs of earlier forwards find their weights.
    """
    partition, is_found = None, False
    for partition in partitions:
        if len(partition.stages) >= num_stages:
            is_found = True
            yield partition
    if partition is not None and not is_found:
        yield partition


def trained_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that require a gradient."""
    return frozenset(name for name, param in model.named_parameters() if param.requires_grad)


def _warn_of_fp32() -> None:
    warnings.warn(
        "a call of the model is outside of the autocast of the calls before it; the weights are streamed in "
        "fp32 from now on, which copies twice as many bytes; to avoid this, run all calls under the same "
        "autocast, also in evaluation",
        PrecisionWarning,
        stacklevel=2,
    )


def _note_live(model: nn.Module, updaters: Updaters) -> None:
    """Record the optimizers of the parameters that no optimizer has updated yet."""
    known = updaters.specs
    params = [(name, param) for name, param in model.named_parameters() if name not in known]
    names = {id(param): name for name, param in params}
    for optimizer in live_optimizers([param for _, param in params]) if params else []:
        updaters.note(optimizer, names)


def _with_masters_of(
    engine: Engine, partition: Partition, old_names: Mapping[str, str], *, in_fp32: bool
) -> Partition:
    """Return the stages with the dtypes of masters, which differ from those that streamed parameters show."""
    known = {param.name: param for stage in engine.plan.trace.stages for param in stage.params}

    def corrected(param: ParamSpec) -> ParamSpec:
        if param.name not in old_names:
            return param
        old = known[old_names[param.name]]
        return dataclasses.replace(
            param, dtype=old.dtype, wire_dtype=old.dtype if in_fp32 else old.wire_dtype
        )

    stages = (
        dataclasses.replace(stage, params=tuple(corrected(param) for param in stage.params))
        for stage in partition.stages
    )
    return dataclasses.replace(partition, stages=tuple(stages))


@contextmanager
def _without_cached_parametrizations() -> Iterator[None]:
    """Enter a context without the cache of `parametrize.cached()`, which would keep fake tensors."""
    before, parametrize._cache_enabled = parametrize._cache_enabled, 0
    try:
        yield
    finally:
        parametrize._cache_enabled = before


@contextmanager
def _unfrozen(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Enter a context in which the parameters with these names require gradients."""
    frozen = [param for name, param in model.named_parameters() if name in names and not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)
