"""A module whose weights are streamed while somebody else's loop trains it."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from headwater.api import transaction
from headwater.api.backend import Backend
from headwater.api.calls import (
    Call,
    asked_precision,
    guard_call,
    is_lazy,
    own_randomness,
    stand_in_loss,
)
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
from headwater.fabric.membership import current
from headwater.plan.partition import Partition, find_stages
from headwater.plan.trace import trace_step
from headwater.plan.types import Plan, Trace
from headwater.plan.writes import refuse_assignments_after_use
from headwater.store.replicas import take_from_first_host
from headwater.store.store import WeightStore
from headwater.store.takeover import take_over
from headwater.stream.at_rest import values_of
from headwater.stream.engine import Engine, Initial
from headwater.stream.leaving import give_back, give_state_back
from headwater.stream.parameters import ParameterAtRest
from headwater.stream.saved_tensors import apart_from_hooks
from headwater.stream.transforms import refuse_first_call

logger = logging.getLogger(__name__)


owners: weakref.WeakKeyDictionary[WeightStore, StreamedModel] = weakref.WeakKeyDictionary()
"""The model of each store."""


class StreamedModel:
    """Streams the weights of `model` from its first forward on; its shapes decide the plan.

    Attributes:
        model: the user's module.
        backend: what the run may take.
        precision: of the run, if known before the first forward; otherwise what autocast asks for around it.
        engine: the engine; `None` before the first forward.
        fabric: the ranks that train it together, from the first forward on.

    Args:
        model: the user's module.
        backend: what the run may take.
    """

    def __init__(self, model: nn.Module, backend: Backend) -> None:
        refuse_shared_memory(model)
        self.model = model
        self.backend = backend
        self.precision: Precision | None = None
        self.engine: Engine | None = None
        self.fabric: Fabric = ALONE
        self._was_planned = False
        self._scalars_shared = 0  # commits whose optimizer scalars all ranks have
        self._updaters = Updaters(lambda: self._planner.device)
        self._structure = Structure(model)
        self._trained: frozenset[str] = frozenset()
        self._seen_trained: frozenset[str] = frozenset()  # of the last call with gradients
        self._largest_batch = 0
        self._planner = Planner(backend)
        self._undo_buffers: Callable[[], None] = _nothing
        self._is_planning = False
        self._knows_training = False  # whether a dry run was made in training mode
        self._unguard = guard_call(model, self._before_call, self._randomness, self._forget_call)
        transaction.register(self)

    def __reduce_ex__(self, protocol: object) -> Any:
        raise StreamError(
            f"a {type(self.model).__name__} that is compiled cannot be copied or pickled",
            remedy="copy it before it is compiled, or load its state_dict() into a module of the same class",
        )

    def _before_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
        """Have an engine for this model and for a batch like this one.

        What was trained once stays in the plan, as loops freeze one model while they train another.

        Returns:
            The error of a dry run before which nothing was streamed. The call then computes as in plain
            PyTorch, and raises what that raises: a hook may raise an error to end the forward.
        """
        if self._is_planning:  # this is the dry run
            return None
        if self.engine is None and is_lazy(self.model):
            return None  # this call gives the parameters their shapes and values, the next one is streamed
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
            return None  # for this call alone: what the model has otherwise is not known now
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
            retrained: whether these are others than at the last call, on any rank.

        Raises:
            StreamError: on every rank, if they differ.
        """
        if retrained and current().size > 1:
            kept = () if self.engine is None else self._structure.old_names(Structure(self.model))
            check_same_trained(current(), self.model, trained, kept)
        self._seen_trained = trained

    def _has_changed(self) -> bool:
        """True if the model has another structure than the engine, and no forward runs that would notice."""
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
        """Surrounds a call of the model."""
        fabric = current()
        if fabric.size == 1 or self._is_planning or not self.model.training:
            return nullcontext()
        return own_randomness(fabric.rank)

    def _forget_call(self) -> None:
        """A call of the model was interrupted."""
        if self.engine is not None:
            self.engine.executor.reset()

    def _start(self, call: Call, *, only_look: bool) -> None:
        """Plan for this call of the model, and move the weights to a store of that plan.

        Args:
            call: the arguments of the call.
            only_look: keep the plan if the forward does not change other weights than in the plan's dry run.
        """
        refuse_shared_memory(self.model)
        # What reads a store is read now: the parameters of this store do not have their values all the time.
        settle_lazy_parameters(self.model, lambda param: values_of(param) is not None)
        if self.engine is None:
            self.fabric = current()
            if not self._was_planned:  # a dry run that failed may have left such tensors in its traceback
                warn_of_references(self.model.named_parameters())
            self._was_planned = True
        old_names = self._structure.old_names(Structure(self.model))
        if current().size > 1:
            check_same_model(current(), self.model, () if self.engine is None else old_names)
        updaters = self._updaters.renamed(old_names)
        self._note_live(updaters)
        kept = self._still_streamed(old_names)
        unchanged = self._structure.is_current and len(kept) == len(old_names)  # the dry run sets forwards
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
                torch.random.fork_rng(devices=drawing_devices()),  # it belongs to the user
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
        """Return the same names without the parameters whose values the engine does not have any more."""
        if self.engine is None:
            return {}
        gone = {self.engine.store.spec(key).name for key in self.engine.departed}
        return {new: old for new, old in old_names.items() if old not in gone}

    def _note_live(self, updaters: Updaters) -> None:
        """Record who updates the parameters that no optimizer has updated yet."""
        known = updaters.specs
        params = [(name, param) for name, param in self.model.named_parameters() if name not in known]
        names = {id(param): name for name, param in params}
        for optimizer in live_optimizers([param for _, param in params]) if params else []:
            updaters.note(optimizer, names)

    def _trace(
        self, call: Call, precision: Precision, old_names: Mapping[str, str], *, inference: bool
    ) -> Trace:
        """Run the model dry."""

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
        """Stream by this plan and these optimizers from now on; weights and optimizer state are kept.

        Args:
            plan: the plan.
            updaters: who updates what.
            old_names: present name -> name in the engine so far, of the parameters that both have.
            unchanged: whether the model has the structure that it had for the engine so far.
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
            fast_matmul=config.matmul == "fast",
            compile_blocks=config.compile,
            verify_disk=config.verify_disk,
            fabric=self.fabric,
            own_loop=True,
        )
        owners[self.engine.store] = self
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
        """Move weights and optimizer state from the engine `before` into `engine` and removed parameters."""
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
        """Copy value, gradient and optimizer state from the store to a parameter that becomes a plain one."""
        assert self.engine is not None, "it has an engine"
        store = self.engine.store
        give_back(store, key, param, self._updaters.state_owner_of(store.spec(key).name))

    def _initial(self, before: Engine | None, old_names: Mapping[str, str]) -> Initial | None:
        """Return what reads the values of the parameters, if they are not in the parameters."""
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
        """Make this optimizer the one that updates those of its parameters that are in this model.

        A parameter that another optimizer has updated until now begins without state. Otherwise the state
        follows the options of the parameter's group.

        Raises:
            ConfigError: if streaming cannot serve the optimizer, or the options of a group.
        """
        assert self.engine is not None, "only streamed parameters are asked for"
        names = self._structure.names
        updaters = self._updaters.renamed({name: name for name in names.values()})
        fresh = updaters.note(optimizer, names)
        if fresh:
            # The state of another optimizer leaves the store: each rank has a part of its scalars.
            self.engine.store.flush()
            self.share_scalars()
            self._part_with_state(fresh)
            has_changed = updaters.specs != self._updaters.specs
            self._update_by(updaters, fresh, rebuild=has_changed or self._has_other_layouts(updaters, fresh))
        self._follow_options(optimizer, names)

    def _follow_options(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        """Change which state the parameters have, if the options of their groups have changed.

        A state is created again where the optimizer has kept nothing so far. All ranks decide the same.

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

        The present state of a parameter is dropped where its layout changes.

        Args:
            loaded: parameter -> the options of its group, and its state, where they come from.
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
                return  # it is refused when it is loaded, and the present states stay
            if rule.state_layout(spec) != store.rule.state_layout(spec):
                others.add(spec.name)
        if others:
            self._update_by(updaters, others, rebuild=True)

    def _has_other_layouts(self, updaters: Updaters, names: Collection[str]) -> bool:
        """True if some of these parameters get other state tensors than they have in the store."""
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
            rebuild: whether the store needs another layout.
        """
        assert self.engine is not None, "only streamed parameters are asked for"
        if rebuild:
            if self.engine.departed:
                raise StreamError(
                    "a parameter got another shape or dtype between the backward and the step",
                    where=self.engine.store.spec(next(iter(self.engine.departed))).name,
                    remedy="change it after the step, or call the model again before the step",
                )
            with self._structure.restored():  # the next forward looks at what has changed since the last
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
        """Give optimizers the state of parameters that another optimizer updates from now on."""
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
        """Of several ranks, let all do their share of updates now; then each may read weights by itself."""
        assert self.engine is not None, "only then there are updates"
        if self.fabric.size > 1:
            self.engine.store.flush()

    def share_scalars(self) -> None:
        """Let every rank have the optimizer scalars of all parameters; all ranks ask alike.

        Raises:
            StreamError: if this one asks alone, and does not have them.
        """
        store = None if self.engine is None else self.engine.store
        if store is None or self.fabric.size == 1 or store.ledger.num_commits == self._scalars_shared:
            return
        if current().size == 1:
            raise StreamError(
                "the state of an optimizer is asked for on one rank, and each has a part of it",
                where="step closure",
                remedy="ask for it in a checkpoint_closure, or in the loop",
            )
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
        """Stop streaming; parameters get their values and gradients back, and optimizers their state."""
        transaction.unregister(self)
        self._unguard()
        if self.engine is not None:
            self.engine.detach()
            for key, param in self.engine.parameters():
                self._give_back(key, param)
            self.engine.close()
            self.engine = None


def _with_masters_of(engine: Engine, partition: Partition, old_names: Mapping[str, str]) -> Partition:
    """Return the same stages with the dtypes of the masters: what is at rest shows only its wire dtype."""
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
    """Within it these parameters require gradients."""
    frozen = [param for name, param in model.named_parameters() if name in names and not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)
