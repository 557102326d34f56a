"""A new plan for a model in a user's loop: a dry run, the plan, and the engine for this plan."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import torch
from torch import nn

from headwater.api.calls import Call, autocast_precision
from headwater.api.engine_swap import Predecessor, ReplaceableEngine
from headwater.api.model_structure import (
    refuse_inference_parameters,
    refuse_shared_memory,
    refuse_tensor_classes,
)
from headwater.api.process_memory import process_memory
from headwater.api.references import warn_of_references
from headwater.api.retracing import restoring_state, traces_of
from headwater.api.same_model import check_same_model
from headwater.api.updaters import Updaters, live_optimizers
from headwater.core.copies import copied_arguments
from headwater.core.empty import settle_lazy_parameters
from headwater.core.interrupts import interruptible
from headwater.core.module_parameters import named_parameters_of
from headwater.core.precision import Precision
from headwater.fabric.membership import current
from headwater.plan.writes import refuse_assignments_after_use
from headwater.stream.detached import values_of
from headwater.stream.left_gradients import is_trained
from headwater.stream.parameters import ParameterAtRest

if TYPE_CHECKING:
    from headwater.api.planner import Planner
    from headwater.plan.step_trace import Trace


class PrecisionWarning(UserWarning):
    """Warns that weights change from bf16 or fp16 to fp32, because a call was outside of autocast."""


@final
class Replanning:
    """Makes plans with which a call of a model can run, and moves the weights to an engine with the plan.

    Attributes:
        is_running: true during a dry run.
        knows_training: true if the plan was made from, or compared with, a dry run in training mode.
        trained: names of the parameters that the plan trains. A parameter that was trained once stays among
            them, because loops such as GANs freeze one model while they train another.

    Args:
        current_engine: the engine of the model.
        planner: makes the plans.
    """

    def __init__(self, current_engine: ReplaceableEngine, planner: Planner) -> None:
        self._current = current_engine
        self._planner = planner
        self._checked: frozenset[int] = frozenset()  # identities of the parameters that were new last time
        self.is_running = False
        self.knows_training = False
        self.trained: frozenset[str] = frozenset()

    @property
    def device(self) -> str:
        """The device that computes: `cpu` or `cuda`."""
        return self._planner.device

    def plan(
        self, call: Call, precision: Precision | None, *, keep_if_unchanged: bool, in_fp32: bool = False
    ) -> None:
        """Make a plan with which a call of the model can run, and move the weights to a new engine.

        Args:
            call: the arguments of the call.
            precision: the precision of the run; that of autocast if not given.
            keep_if_unchanged: keep the plan if the forward changes the same weights as in the plan's dry run.
            in_fp32: stream weights in fp32 from now on; overrides `precision`.
        """
        now = self._current
        self._prepare()
        target = self._target(in_fp32=in_fp32)
        precision = self._precision(precision, in_fp32=in_fp32)
        with self._running(), restoring_state(now.model, target.trained):
            self._planner.stop_early(now.model, call, precision)
            traces = traces_of(
                now,
                copied_arguments(call),
                precision,
                target.kept,
                inference=not target.trained,
                device=self.device,
            )
            trace = next(traces)
            refuse_assignments_after_use(trace.assigned_after_use)
            same_dtypes = now.engine is None or _dtypes(trace) == _dtypes(now.engine.plan.trace)
            same_writes = now.engine is not None and trace.written == now.engine.plan.trace.written
            if keep_if_unchanged and same_writes and same_dtypes:
                now.accept_structure()
                self.knows_training |= now.model.training
                return
            target = dataclasses.replace(target, unchanged=target.unchanged and same_dtypes)
            before = self._predecessor(target)
            process = process_memory(now, self.device, is_limited=self._planner.limits_device)
            plan = interruptible(
                self._planner.plan, trace, traces, precision, target.updaters, now.fabric, before, process
            )
            now.replace(plan, target.updaters, target.kept, unchanged=target.unchanged)
            self.trained = target.trained
            # A training forward may change weights that a forward in evaluation mode does not change.
            self.knows_training = now.model.training

    def _prepare(self) -> None:
        """Raise for parameters that cannot be streamed. Read lazy parameters whose values are in a store."""
        now, model = self._current, self._current.model
        refuse_tensor_classes(model)
        refuse_shared_memory(model)
        refuse_inference_parameters(model)
        # These parameters are read now, because the store may not have their values later.
        settle_lazy_parameters(model, lambda param: values_of(param) is not None)
        if now.engine is None:
            now.join_ranks()
        new = [named for named in named_parameters_of(model) if not isinstance(named[1], ParameterAtRest)]
        # Only once: if the dry run fails, its traceback may hold tensors with the memory of a parameter.
        warn_of_references(named for named in new if id(named[1]) not in self._checked)
        self._checked = frozenset(id(param) for _, param in new)

    def _target(self, *, in_fp32: bool) -> _Target:
        """Return the facts about the model and its optimizers on which the next engine depends.

        Call this before the dry run, which replaces forwards.
        """
        now, model = self._current, self._current.model
        old_names = now.old_names()
        if current().size > 1:
            check_same_model(current(), model, () if now.engine is None else old_names)
        updaters = now.updaters.renamed(old_names)
        _note_live(model, updaters)
        kept = now.still_streamed(old_names)
        same_parameters = now.structure.is_current and len(kept) == len(old_names)
        return _Target(
            updaters,
            kept,
            trained_names(model).union(new for new, old in old_names.items() if old in self.trained),
            # After a change to fp32, graphs of earlier forwards still refer to weights in the other dtype.
            unchanged=same_parameters and not in_fp32,
        )

    def _precision(self, asked: Precision | None, *, in_fp32: bool) -> Precision:
        """Return the precision of the next engine; see `plan`."""
        if in_fp32:
            _warn_of_fp32()
        if self._current.engine is None:
            return asked or autocast_precision(self.device)
        return Precision() if in_fp32 else self._current.engine.plan.precision

    def _predecessor(self, target: _Target) -> Predecessor | None:
        """Return the engine that the next engine will replace; `None` before the first engine."""
        now = self._current
        if now.engine is None:
            return None
        return Predecessor(now.engine.plan, target.unchanged and now.updates_as(target.updaters))

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Enter a context in which `is_running` is true."""
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False


@dataclasses.dataclass(frozen=True)
class _Target:
    """The facts about a model and its optimizers on which the next engine depends.

    Attributes:
        updaters: the optimizer of each parameter.
        kept: present name -> name in the engine, of the parameters that the engine streams now.
        trained: names of the parameters that the plan trains.
        unchanged: true if the engine streams exactly the present parameters, in the same dtypes.
    """

    updaters: Updaters
    kept: dict[str, str]
    trained: frozenset[str]
    unchanged: bool


def _dtypes(trace: Trace) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Return for each parameter the dtype in which it is sent to the device, and that of its gradients."""
    return {param.name: (param.wire_dtype, param.gradient_dtype) for param in trace.params}


def trained_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that require a gradient, or got one while they were frozen."""
    return frozenset(name for name, param in named_parameters_of(model) if is_trained(param))


def _warn_of_fp32() -> None:
    warnings.warn(
        "a call of the model is not under the autocast of earlier calls; the weights are streamed in "
        "fp32 from now on, which copies twice as many bytes; to avoid this, run all calls under the same "
        "autocast, also in evaluation",
        PrecisionWarning,
        stacklevel=2,
    )


def _note_live(model: nn.Module, updaters: Updaters) -> None:
    """Record the optimizers of the parameters that no optimizer has updated yet."""
    known = updaters.specs
    params = [(name, param) for name, param in named_parameters_of(model) if name not in known]
    names = {id(param): name for name, param in params}
    for optimizer in live_optimizers([param for _, param in params]) if params else []:
        updaters.note(optimizer, names)
