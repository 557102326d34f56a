"""Streaming of a module's weights while the user's loop trains the module."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import nn

from headwater.api import registry, transaction
from headwater.api.backend import Backend
from headwater.api.call_changes import CallChanges, Need
from headwater.api.calls import Call, guard_call, is_lazy, own_randomness, serves_call
from headwater.api.engine_swap import ReplaceableEngine
from headwater.api.model_structure import (
    Structure,
    has_replaced_parameters,
    refuse_inference_parameters,
    refuse_shared_memory,
    refuse_tensor_classes,
)
from headwater.api.optimizer_book import OptimizerBook
from headwater.api.planner import Planner
from headwater.api.references import warn_of_changed_sources
from headwater.api.replanning import Replanning, trained_names
from headwater.api.same_model import check_same_trained
from headwater.api.step_participant import StreamedSteps
from headwater.api.updaters import Updaters
from headwater.core.empty import initial_values
from headwater.core.errors import HeadwaterError, StreamError
from headwater.core.module_calls import cannot_be_pickled
from headwater.core.module_parameters import parameters_of
from headwater.core.precision import Precision
from headwater.core.trees import tensors_in
from headwater.fabric.membership import current
from headwater.stream.engine import Engine
from headwater.stream.transforms import refuse_first_call

ATTRIBUTE = "_headwater"
"""The attribute of a compiled module: its `StreamedModel`, or `None` on a backend that does not stream.

It is `False` in a deep copy of a streamed module, which is a plain module.
"""


@final
class StreamedModel:
    """Streams the weights of one module. Streaming begins at the first forward, whose shapes decide the plan.

    Attributes:
        model: the user's module.
        precision: the precision of the run, or `None` to use the precision of autocast at the first forward.
        current: the engine, with the facts for which it was made.
        steps: commits or undoes the user's steps.
        optimizers: which optimizer updates which parameter.
        awaits_call: true until the first call of the module with its own parameters.

    Args:
        model: the user's module.
        backend: the backend with the resource limits.
    """

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        refuse_tensor_classes(model)
        refuse_shared_memory(model)
        refuse_inference_parameters(model)
        planner = Planner(backend)
        self.model = model
        self.precision: Precision | None = None
        self.current = ReplaceableEngine(
            model,
            backend.config,
            Updaters(lambda: planner.device),
            lambda store: registry.register(store, self),
        )
        self.steps = StreamedSteps(self.current)
        self.optimizers = OptimizerBook(self.current, self.steps)
        self.awaits_call = True
        self._replanning = Replanning(self.current, planner)
        self._last_trained: frozenset[str] = frozenset()  # at the last call with gradients
        self._largest_batch = 0
        self._unguard = guard_call(model, self._before_call, self._randomness, self._forget_call)
        transaction.register(self.steps)
        registry.note_compiled(self)

    def __deepcopy__(self, memo: object) -> bool:
        """Return the attribute of a copy of the module; see `ATTRIBUTE`."""
        return False

    def __reduce_ex__(self, protocol: object) -> Any:
        raise cannot_be_pickled(self.model)

    @property
    def engine(self) -> Engine | None:
        """The engine; `None` before the first forward."""
        return self.current.engine

    def _before_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
        """Make sure that the engine fits the present model and this batch; plan again if it does not.

        Returns:
            The error of a dry run that failed before anything was streamed, or `None`. The call then computes
            as in plain PyTorch, and its own error is raised: a hook may raise an error to end the forward.
        """
        if self._replanning.is_running:  # this is the dry run
            return None
        warn_of_changed_sources()
        _refuse_traces(self.model)
        if self.engine is None and is_lazy(self.model):
            self.awaits_call = False
            # This call creates the parameters, and the next one is streamed. Backward of this call needs
            # gradients in fp32 if it is outside of autocast.
            if not torch.is_autocast_enabled(self._replanning.device):
                self.precision = Precision()
            return None
        if self._serves() and not torch.is_grad_enabled() and not self.current.has_changed:
            return None  # without gradients any plan of this precision works; a fast path for generation
        changes = self._changes((args, kwargs))
        need = changes.need(None if self.engine is None else self._largest_batch)
        if need is Need.NOTHING or has_replaced_parameters(self.model):
            return None  # if parameters are replaced, `functional_call` runs the model with others
        self.awaits_call = False
        refuse_first_call()
        refuse_compiled_parts(self.model)
        self._check_not_alone()
        return self._plan((args, kwargs), changes, need)

    def _changes(self, call: Call) -> CallChanges:
        """Return the differences between a call and the calls before it. Check that ranks train the same."""
        trained = trained_names(self.model)
        changes = CallChanges(
            size=sum(tensor.numel() for tensor in tensors_in(call)),
            structure=self.current.has_changed,
            trains_more=not trained <= self._replanning.trained,
            first_training=self.model.training and not self._replanning.knows_training,
            retrained=trained != self._last_trained,
            precision=self.engine is not None and not self._serves(),
        )
        if self.engine is None or torch.is_grad_enabled():
            # All ranks exchange this, even a rank whose plan fits: the other ranks wait for its value.
            changes = changes.of_any_rank(current())
            self._check_trained(trained, retrained=changes.retrained)
        return changes

    def _serves(self) -> bool:
        """True if the present call can use weights in the precision in which the model is streamed."""
        if self.engine is None:
            return False
        # If the user has set a precision, it is used for every call: the forward itself may enter autocast.
        return self.precision is not None or serves_call(self.engine.plan.precision, self.engine.plan.device)

    def _plan(self, call: Call, changes: CallChanges, need: Need) -> Exception | None:
        """Make a plan for a call. Return the error of a failed plan if the call can run without a plan.

        Args:
            call: the arguments of the call.
            changes: its differences from earlier calls.
            need: the decision of `changes`.
        """
        before = self.engine
        try:
            self._replanning.plan(
                call,
                self.precision,
                keep_if_unchanged=need is Need.DRY_RUN,
                in_fp32=changes.precision,
            )
        except HeadwaterError:
            raise
        except Exception as error:
            if self.engine is not None or self.current.fabric.size > 1 or not _has_values(self.model):
                raise
            return error
        if before is None and transaction.is_open():
            self.steps.begin_step()
        # A new plan may keep activations for which a larger batch has no memory. With several ranks only
        # calls with gradients compare their sizes, so only these may make a plan for a larger batch.
        is_new = self.engine is not before and current().size == 1
        self._largest_batch = changes.size if is_new else max(changes.size, self._largest_batch)
        return None

    def _check_trained(self, trained: frozenset[str], *, retrained: bool) -> None:
        """Check that all ranks train the same parameters, after parameters were frozen or unfrozen.

        Args:
            trained: the parameters of this rank that require a gradient.
            retrained: true if this set has changed since the last call, on any rank.

        Raises:
            StreamError: on every rank, if the sets differ between ranks.
        """
        if retrained and current().size > 1:
            kept = () if self.engine is None else self.current.old_names()
            check_same_trained(current(), self.model, trained, kept)
        self._last_trained = trained

    def _check_not_alone(self) -> None:
        """Raise if only this rank makes a new plan: all ranks must call a model that has changed.

        Raises:
            StreamError: if this rank alone calls a model whose structure has changed.
        """
        if self.engine is not None and current().size < self.current.fabric.size:
            change = self.current.structure.difference(Structure(self.model))
            raise StreamError(
                f"the model has changed ({change}), and only one rank calls it",
                where=type(self.model).__name__,
                remedy="call it on all ranks once after such a change, outside of closures",
            )

    def _randomness(self) -> AbstractContextManager[None]:
        """Return a context for a call of the model. In it, each rank draws different random numbers."""
        fabric = current()
        if fabric.size == 1 or self._replanning.is_running or not self.model.training:
            return nullcontext()
        return own_randomness(fabric.rank)

    def _forget_call(self) -> None:
        """Reset the executor after a call of the model was interrupted."""
        if self.engine is not None:
            self.engine.executor.reset()

    def release(self) -> None:
        """Stop streaming, and return values and gradients to the parameters and states to the optimizers."""
        transaction.unregister(self.steps)
        registry.unregister(self)
        self._unguard()
        self.current.release()


def _refuse_traces(model: nn.Module) -> None:
    """Raise if torch records a call of the model: the record would refer to slabs.

    Raises:
        StreamError: if it does.
    """
    is_traced = torch._C._get_tracing_state() is not None
    name = "torch.jit.trace" if is_traced else "torch.export.export"
    if is_traced or torch.compiler.is_exporting():
        raise StreamError(
            f"{name} cannot record a model whose weights are streamed",
            where=type(model).__name__,
            remedy=f"record a copy: {name}(copy.deepcopy(model), ...)",
        )


def refuse_compiled_parts(model: nn.Module) -> None:
    """Raise if a module inside the model is compiled by itself: two engines would stream its weights.

    Raises:
        StreamError: if a module inside the model is compiled.
    """
    for name, module in model.named_modules():
        if module is not model and isinstance(vars(module).get(ATTRIBUTE), StreamedModel):
            raise StreamError(
                f"a {type(module).__name__} inside this {type(model).__name__} is compiled by itself",
                where=name,
                remedy="compile only the whole model; headwater.release(part) ends the streaming of the part",
            )


def _has_values(model: nn.Module) -> bool:
    """True if every parameter has its values in memory."""
    return not initial_values(model) and not any(param.is_meta for param in parameters_of(model))
