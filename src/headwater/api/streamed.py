"""Streaming of a module's weights while the user's loop trains the module."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from headwater.api import registry, transaction
from headwater.api.backend import Backend
from headwater.api.calls import (
    Call,
    asked_precision,
    guard_call,
    is_lazy,
    own_randomness,
    stand_in_loss,
)
from headwater.api.machine import engine_options
from headwater.api.planner import Planner
from headwater.api.references import warn_of_references
from headwater.api.same_model import check_same_model, check_same_trained
from headwater.api.updaters import Updaters, live_optimizers, state_tensors
from headwater.api.watcher import Structure, has_lent_parameters, refuse_shared_memory
from headwater.core.buffers import tune_allocator
from headwater.core.copies import apart
from headwater.core.empty import initial_values, settle_lazy_parameters
from headwater.core.errors import HeadwaterError, StreamError
from headwater.core.precision import Precision
from headwater.core.seeding import drawing_devices
from headwater.core.stage import ParamKey, ParamSpec
from headwater.core.trees import tensors_in
from headwater.fabric.fabric import ALONE, Fabric
from headwater.fabric.membership import current, require_all_ranks
from headwater.plan.partition import Partition, find_stages
from headwater.plan.trace import trace_step
from headwater.plan.types import Plan, Trace
from headwater.plan.writes import refuse_assignments_after_use
from headwater.store.replicas import take_from_first_host
from headwater.store.takeover import take_over
from headwater.stream.at_rest import values_of
from headwater.stream.engine import Engine, Initial
from headwater.stream.leaving import give_back, give_state_back
from headwater.stream.parameters import ParameterAtRest
from headwater.stream.saved_tensors import apart_from_hooks
from headwater.stream.transforms import refuse_first_call

logger = logging.getLogger(__name__)


class StreamedModel:
    """The streaming of one module. It begins at the first forward, whose shapes decide the plan.

    Attributes:
        model: the user's module.
        backend: the backend with the resource limits.
        precision: the precision of the run, or `None` to use the precision of autocast at the first forward.
        engine: the engine; `None` before the first forward.
        fabric: the ranks that train the module together, from the first forward on.

    Args:
        model: the user's module.
        backend: the backend.
    """

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        refuse_shared_memory(model)
        self.model = model
        self.backend = backend
        self.precision: Precision | None = None
        self.engine: Engine | None = None
        self.fabric: Fabric = ALONE
        self._was_planned = False
        self._scalars_shared = 0  # number of commits whose scalars all ranks have
        self._updaters = Updaters(lambda: self._planner.device)
        self._structure = Structure(model)
        self._trained: frozenset[str] = frozenset()
        self._seen_trained: frozenset[str] = frozenset()  # at the last call with gradients
        self._largest_batch = 0
        self._planner = Planner(backend)
        self._undo_buffers: Callable[[], None] = _nothing
        self._is_planning = False
        self._knows_training = False  # true after a dry run in training mode
        self._unguard = guard_call(model, self._before_call, self._randomness, self._forget_call)
        transaction.register(self)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise StreamError(
            f"a {type(self.model).__name__} that is compiled cannot be copied or pickled",
            remedy="copy it before it is compiled, or load its state_dict() into a module of the same class",
        )

    def _before_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
        """Make sure that the engine fits the present model and this batch; plan again if it does not.

        A parameter that was trained once stays a trained one in the plan, because loops such as GANs freeze
        one model while they train another.

        Returns:
            The error of a dry run that failed before anything was streamed, or `None`. The call then computes
            as in plain PyTorch, and its own error is raised: a hook may raise an error to end the forward.
        """
        if self._is_planning:  # this is the dry run
            return None
        if self.engine is None and is_lazy(self.model):
            return None  # this call creates the parameters; the next call is streamed
        size = sum(tensor.numel() for tensor in tensors_in((args, kwargs)))
        changed = self._has_changed()
        trained = _trained(self.model)
        trains_more, retrained = not trained <= self._trained, trained != self._seen_trained
        new_mode = self.model.training and not self._knows_training
        if self.engine is None or torch.is_grad_enabled():
            flags = changed | trains_more << 1 | new_mode << 2 | retrained << 3
            seen = [int(each) for each in current().gather(size << 4 | flags)]
            # All ranks plan if one of them must: a rank that planned alone would wait for the others.
            size = max(seen) >> 4
            changed, trains_more, new_mode, retrained = (
                any(each >> bit & 1 for each in seen) for bit in range(4)
            )
            self._check_trained(trained, retrained=retrained)
        fits = size <= self._largest_batch and not trains_more and not changed
        if (
            self.engine is not None
            and not changed
            and ((fits and not new_mode) or not torch.is_grad_enabled())
        ):
            return None
        if has_lent_parameters(self.model):
            return None  # the model's usual parameters are not known during this call
        refuse_first_call()
        self._check_not_alone()
        self._largest_batch = max(size, self._largest_batch)
        try:
            self._start((args, kwargs), only_look=fits and self.engine is not None)
        except HeadwaterError:
            raise
        except Exception as error:
            if self.engine is not None or self.fabric.size > 1 or not _has_values(self.model):
                raise
            self._largest_batch = 0
            return error
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
            kept = () if self.engine is None else self._structure.old_names(Structure(self.model))
            check_same_trained(current(), self.model, trained, kept)
        self._seen_trained = trained

    def _has_changed(self) -> bool:
        """True if the model's structure differs from the engine's, and no forward is running."""
        if self.engine is None or not self.engine.executor.is_idle:
            return False
        if self._structure.is_current:
            return bool(self.engine.departed)
        return not has_lent_parameters(self.model)

    def _check_not_alone(self) -> None:
        """Check that every rank plans.

        Raises:
            StreamError: if this rank alone calls a model whose structure has changed.
        """
        if self.engine is not None and current().size < self.fabric.size:
            change = self._structure.difference(Structure(self.model))
            raise StreamError(
                f"the model has changed ({change}), and only one rank calls it",
                where=type(self.model).__name__,
                remedy="call it on all ranks once after such a change, outside of closures",
            )

    def _randomness(self) -> AbstractContextManager[None]:
        """Return the context of a call of the model, in which each rank draws different random numbers."""
        fabric = current()
        if fabric.size == 1 or self._is_planning or not self.model.training:
            return nullcontext()
        return own_randomness(fabric.rank)

    def _forget_call(self) -> None:
        """Reset the executor after a call of the model was interrupted."""
        if self.engine is not None:
            self.engine.executor.reset()

    def _start(self, call: Call, *, only_look: bool) -> None:
        """Plan for this call of the model, and move the weights to a store of that plan.

        Args:
            call: the arguments of the call.
            only_look: keep the plan if the forward changes the same weights as in the plan's dry run.
        """
        refuse_shared_memory(self.model)
        # Read now what reads from a store: later, parameters may not have their values when they are read.
        settle_lazy_parameters(self.model, lambda param: values_of(param) is not None)
        if self.engine is None:
            self.fabric = current()
            if not self._was_planned:  # later, the traceback of a failed dry run may hold such tensors
                warn_of_references(self.model.named_parameters())
            self._was_planned = True
        old_names = self._structure.old_names(Structure(self.model))
        if current().size > 1:
            check_same_model(current(), self.model, () if self.engine is None else old_names)
        updaters = self._updaters.renamed(old_names)
        self._note_live(updaters)
        kept = self._still_streamed(old_names)
        unchanged = self._structure.is_current and len(kept) == len(old_names)  # the dry run changes forwards
        trained = _trained(self.model).union(new for new, old in old_names.items() if old in self._trained)
        device = self._planner.device
        precision = self.engine.plan.precision if self.engine else self.precision or asked_precision(device)
        self._is_planning = True
        try:
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                apart_from_hooks(),
                _unfrozen(self.model, trained),
                torch.random.fork_rng(devices=drawing_devices()),  # the user's random state must not change
            ):
                self._planner.stop_early(self.model, call, precision)
                trace = self._trace(apart(call), precision, kept, inference=not trained)
                refuse_assignments_after_use(trace.assigned_after_use)
                self._knows_training |= self.model.training
                if only_look and self.engine and trace.written == self.engine.plan.trace.written:
                    self._structure = Structure(self.model)
                    return
                plan = self._planner.plan(trace, precision, updaters.state_bytes, self.fabric)
                self._rebuild(plan, updaters, kept, unchanged=unchanged)
                self._trained = trained
        finally:
            self._is_planning = False

    def _still_streamed(self, old_names: Mapping[str, str]) -> dict[str, str]:
        """Return `old_names` without the parameters that have left the engine."""
        if self.engine is None:
            return {}
        gone = {self.engine.store.spec(key).name for key in self.engine.departed}
        return {new: old for new, old in old_names.items() if old not in gone}

    def _note_live(self, updaters: Updaters) -> None:
        """Record the optimizers of the parameters that no optimizer has updated yet."""
        known = updaters.specs
        params = [(name, param) for name, param in self.model.named_parameters() if name not in known]
        names = {id(param): name for name, param in params}
        for optimizer in live_optimizers([param for _, param in params]) if params else []:
            updaters.note(optimizer, names)

    def _trace(
        self, call: Call, precision: Precision, old_names: Mapping[str, str], *, inference: bool
    ) -> Trace:
        """Return the trace of a dry run of the model."""

        def run(partition: Partition) -> Trace:
            return trace_step(
                self.model,
                call,
                precision,
                loss_function=stand_in_loss,
                partition=partition,
                inference=inference,
            )

        partition = find_stages(self.model, precision)
        if self.engine is None:
            return run(partition)
        self.engine.store.flush()  # no update must meet fake tensors
        with self.engine.executor.paused():
            return run(_with_masters_of(self.engine, partition, old_names))

    def _rebuild(
        self, plan: Plan, updaters: Updaters, old_names: Mapping[str, str], *, unchanged: bool
    ) -> None:
        """Replace the engine by one with this plan and these optimizers; keep weights and optimizer state.

        Args:
            plan: the plan.
            updaters: the optimizer of each parameter.
            old_names: present name -> name in the old engine, of the parameters that both have.
            unchanged: true if the model has the same structure as for the old engine.
        """
        config, before = self.backend.config, self.engine
        if plan.device == "cpu" and config.allocator == "tuned":
            tune_allocator(keep=plan.memory_is_ample)
        if before is not None:
            before.detach()
        self.engine = Engine(
            self.model,
            plan,
            updaters.rule,
            initial=self._initial(before, old_names),
            fabric=self.fabric,
            options=engine_options(config, user_loop=True),
        )
        registry.register(self.engine.store, self)
        self._scalars_shared = 0
        self.engine.when_departed(self._give_back)
        if before is not None:
            self._succeed(before, self.engine, old_names, unchanged=unchanged)
        self._updaters, self._structure = updaters, Structure(self.model)
        if before is not None:
            return
        if self.fabric.num_hosts > 1:
            take_from_first_host(self.engine.store, self.fabric)
        if transaction.is_open():
            self.begin_step()

    def _succeed(
        self, before: Engine, engine: Engine, old_names: Mapping[str, str], *, unchanged: bool
    ) -> None:
        """Move weights and optimizer state from an old engine to a new one.

        Parameters that the model has lost become plain ones.

        Args:
            before: the old engine.
            engine: the new engine.
            old_names: new name -> old name, of the parameters that both have.
            unchanged: true if the model has the same structure as for the old engine.
        """
        if self.fabric.size > 1:
            before.store.flush()
            before.store.scalars.share()
        take_over(engine.store, before.store, old_names)
        kept = set(old_names.values())
        for key, param in before.parameters():
            name = before.store.spec(key).name
            if name not in kept and key not in before.departed:
                give_back(before.store, key, param, self._updaters.state_owner_of(name))
        before.hand_over(engine, unchanged=unchanged)

    def _give_back(self, key: ParamKey, param: nn.Parameter) -> None:
        """Copy value, gradient and optimizer state from the store to a parameter that leaves it."""
        assert self.engine is not None, "it has an engine"
        store = self.engine.store
        give_back(store, key, param, self._updaters.state_owner_of(store.spec(key).name))

    def _initial(self, before: Engine | None, old_names: Mapping[str, str]) -> Initial | None:
        """Return a function that reads the parameters' values, or `None` if the parameters have them."""
        known = initial_values(self.model)
        if not known and before is None:
            return None
        params = dict(self.model.named_parameters())

        def value(spec: ParamSpec) -> torch.Tensor:
            if before is not None and spec.name in old_names:
                return before.master(old_names[spec.name])
            return known[spec.name]() if spec.name in known else params[spec.name].detach()

        return value

    def update_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that this optimizer updates its parameters that are in this model.

        If another optimizer has updated a parameter before, the parameter begins without state. Otherwise its
        state is adapted to the options of its group.

        Raises:
            ConfigError: if streaming cannot serve the optimizer, or the options of a group.
        """
        assert self.engine is not None, "only streamed parameters are asked for"
        names = self._structure.names
        updaters = self._updaters.renamed({name: name for name in names.values()})
        fresh = updaters.note(optimizer, names)
        if fresh:
            # The state of another optimizer leaves the store. Each rank has only a part of its scalars.
            self.engine.store.flush()
            self.share_scalars()
            self._part_with_state(fresh)
            has_changed = updaters.specs != self._updaters.specs
            self._update_by(updaters, fresh, rebuild=has_changed or self._has_other_layouts(updaters, fresh))
        self._follow_options(optimizer, names)

    def _follow_options(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        """Adapt the state of the parameters if the options of their groups have changed.

        A parameter without state so far begins a new one. The decision is the same on all ranks.

        Raises:
            ConfigError: if a state lacks a tensor that the optimizer needs now.
        """
        changed = self._updaters.changed(optimizer, names)
        if not changed:
            return
        assert self.engine is not None, "only streamed parameters are asked for"
        store = self.engine.store
        store.flush()
        self.share_scalars()
        updaters, began = self._updaters.renamed({name: name for name in names.values()}), set()
        for key, _ in self.engine.parameters():
            spec, scalars = store.spec(key), store.scalars.of(key[0])[key[1]]
            if spec.name not in changed:
                continue
            if scalars is not None and (scalars or store.rule.state_layout(spec)):
                updaters.keep_state(spec, changed[spec.name])
            else:
                updaters.begin_state(spec.name, changed[spec.name])
                began.add(spec.name)
        self._update_by(updaters, began, rebuild=self._has_other_layouts(updaters, began))

    def expect_states(self, loaded: Mapping[ParamKey, tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
        """Change the layout of the store for states that are about to be loaded.

        If the layout of a parameter's state changes, its present state is dropped.

        Args:
            loaded: parameter -> the options of its group and its state, as they were saved.
        """
        assert self.engine is not None, "only streamed parameters are asked for"
        store = self.engine.store
        updaters, others = self._updaters.renamed({n: n for n in self._structure.names.values()}), set()
        for key, (options, state) in loaded.items():
            updaters.expect_state(store.spec(key).name, options, state)
        rule = updaters.rule
        for key, (_, state) in loaded.items():
            spec, tensors = store.spec(key), state_tensors(state)
            if rule.state_layout(spec).keys() != tensors.keys():
                return  # loading it will raise an error, and the present states stay
            if rule.state_layout(spec) != store.rule.state_layout(spec):
                others.add(spec.name)
        if others:
            self._update_by(updaters, others, rebuild=True)

    def _has_other_layouts(self, updaters: Updaters, names: Collection[str]) -> bool:
        """True if `updaters` needs other state tensors of these parameters than the store has."""
        assert self.engine is not None, "only streamed parameters are asked for"
        store, rule = self.engine.store, updaters.rule
        specs = [store.spec(key) for key, _ in self.engine.parameters()]
        return any(
            rule.state_layout(spec) != store.rule.state_layout(spec) for spec in specs if spec.name in names
        )

    def _update_by(self, updaters: Updaters, fresh: Collection[str], *, rebuild: bool) -> None:
        """Replace the optimizers of the parameters.

        Args:
            updaters: the optimizers.
            fresh: the parameters whose present state is dropped.
            rebuild: true if the store needs another layout.
        """
        assert self.engine is not None, "only streamed parameters are asked for"
        if rebuild:
            if self.engine.departed:
                raise StreamError(
                    "a parameter got another shape or dtype between the backward and the step",
                    where=self.engine.store.spec(next(iter(self.engine.departed))).name,
                    remedy="change it after the step, or call the model again before the step",
                )
            with self._structure.restored():  # the next forward must still see the user's changes
                same = {name: name for name in self._structure.names.values()}
                self._rebuild(self.engine.plan, updaters, same, unchanged=True)
        self._updaters = updaters
        store = self.engine.store
        for stage in store.stages:
            scalars = store.scalars.of(stage.index)
            for index, param in enumerate(stage.params):
                if param.name in fresh:
                    scalars[index] = None

    def _part_with_state(self, names: Collection[str]) -> None:
        """Give the present optimizers of these parameters their state back; another optimizer follows."""
        assert self.engine is not None, "only then there is a state"
        for key, param in self.engine.parameters():
            name = self.engine.store.spec(key).name
            updater = self._updaters.state_owner_of(name) if name in names else None
            if updater is not None:
                give_state_back(self.engine.store, key, param, updater)

    def is_updated_by(self, param: ParameterAtRest, optimizer: torch.optim.Optimizer) -> bool:
        """True if the state that the store has for a parameter is this optimizer's."""
        return self._updaters.updater_of(param.home.spec.name) is optimizer

    # a step as a transaction

    def begin_step(self) -> None:
        if self.engine is not None:
            self.engine.store.begin_transaction()
            self._undo_buffers = self.engine.buffers.remember()

    def end_step(self) -> None:
        if self.engine is not None:
            self.engine.store.end_transaction()
            self.apply_updates()
        self._undo_buffers = _nothing

    def apply_updates(self) -> None:
        """With several ranks, apply all waiting updates. Then each rank can read weights without the others.

        All ranks must call this.
        """
        assert self.engine is not None, "only then there are updates"
        if self.fabric.size > 1:
            self.engine.store.flush()

    def share_scalars(self) -> None:
        """Exchange the optimizer scalars, so that every rank has those of all parameters.

        All ranks must call this.

        Raises:
            StreamError: if one rank calls this alone and does not have all scalars.
        """
        store = None if self.engine is None else self.engine.store
        if store is None or self.fabric.size == 1 or store.ledger.num_commits == self._scalars_shared:
            return
        require_all_ranks("the state of an optimizer")
        store.scalars.share()
        self._scalars_shared = store.ledger.num_commits

    def abort_step(self) -> None:
        if self.engine is None:
            return
        self.engine.executor.reset()
        if not self.engine.store.roll_back():
            logger.warning("the step had been used by a forward after optimizer.step(): it stays applied")
        self._undo_buffers()
        self.end_step()

    def release(self) -> None:
        """Stop streaming, and return values and gradients to the parameters and states to the optimizers."""
        transaction.unregister(self)
        registry.unregister(self)
        self._unguard()
        if self.engine is not None:
            self.engine.detach()
            for key, param in self.engine.parameters():
                self._give_back(key, param)
            self.engine.close()
            self.engine = None


def _with_masters_of(engine: Engine, partition: Partition, old_names: Mapping[str, str]) -> Partition:
    """Return the stages with the dtypes of the masters. A streamed parameter itself shows the wire dtype."""
    known = {param.name: param for stage in engine.plan.trace.stages for param in stage.params}

    def corrected(param: ParamSpec) -> ParamSpec:
        if param.name not in old_names:
            return param
        old = known[old_names[param.name]]
        return dataclasses.replace(param, dtype=old.dtype, wire_dtype=old.wire_dtype)

    stages = (
        dataclasses.replace(stage, params=tuple(corrected(param) for param in stage.params))
        for stage in partition.stages
    )
    return dataclasses.replace(partition, stages=tuple(stages))


def _has_values(model: nn.Module) -> bool:
    """True if every parameter has its values in memory."""
    return not initial_values(model) and not any(param.is_meta for param in model.parameters())


def _nothing() -> None:
    pass


def _trained(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, param in model.named_parameters() if param.requires_grad)


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
