"""The engine of a user's model, and its replacement by another engine during training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from typing import final

import torch
from torch import nn

from headwater.api.engines import build_engine
from headwater.api.model_structure import Structure, has_replaced_parameters
from headwater.api.updaters import Updaters
from headwater.config.sections import BackendConfig
from headwater.core.cleanup import on_failure
from headwater.core.empty import initial_values
from headwater.core.interrupts import uninterrupted
from headwater.core.module_parameters import named_parameters_of
from headwater.core.stage import ParamKey, ParamSpec
from headwater.fabric.fabric import ALONE, Fabric
from headwater.fabric.membership import current
from headwater.plan.types import Plan
from headwater.store.replicas import take_from_first_host
from headwater.store.store import WeightStore
from headwater.store.takeover import take_over
from headwater.stream.engine import Engine
from headwater.stream.gradient_nodes import warn_of_lost_hooks
from headwater.stream.leaving import HOST, give_back, give_state_back, move_to_host
from headwater.stream.options import Initial
from headwater.stream.store_settings import StoreSettings


@dataclasses.dataclass(frozen=True)
class Predecessor:
    """An engine that is about to be replaced.

    Attributes:
        plan: its plan.
        may_keep_store: true if the structure of the model and its optimizers are those of its store.
    """

    plan: Plan
    may_keep_store: bool


@final
class ReplaceableEngine:
    """The engine that streams a model. It is replaced when the model or its optimizers change.

    Other objects read the attributes, and change them by methods alone.

    Attributes:
        model: the user's module.
        engine: the engine; `None` before the first plan.
        fabric: the ranks that train the module together, from the first plan on.
        structure: the structure of the model when the engine was made.
        updaters: the optimizer of each parameter.

    Args:
        model: the user's module.
        config: the options of the backend.
        updaters: the optimizers that are known before the first engine.
        note_store: called with the store of each new engine.
    """

    def __init__(
        self,
        model: nn.Module,
        config: BackendConfig,
        updaters: Updaters,
        note_store: Callable[[WeightStore], None],
    ) -> None:
        self.model = model
        self.engine: Engine | None = None
        self.fabric: Fabric = ALONE
        self.structure = Structure(model)
        self.updaters = updaters
        self._config = config
        self._note_store = note_store

    @property
    def present(self) -> Engine:
        """The engine. The model must be streamed already."""
        assert self.engine is not None, "streamed parameters have an engine"
        return self.engine

    @property
    def has_changed(self) -> bool:
        """True if the model needs a new engine, and no forward or backward runs that still uses this one."""
        if self.engine is None or not self.engine.executor.is_idle:
            return False
        if self.structure.is_current:
            # The engine stays detached after an attempt to replace it has failed.
            return bool(self.engine.departed) or self.engine.is_detached
        return not has_replaced_parameters(self.model)

    def join_ranks(self) -> None:
        """Train with the present ranks from now on. Called before the first engine is made."""
        self.fabric = current()

    def accept_structure(self) -> None:
        """Record that the engine fits the model as it is now."""
        self.structure = Structure(self.model)

    def old_names(self) -> dict[str, str]:
        """Return present name -> name when the engine was made, for each parameter that existed then."""
        return self.structure.old_names(Structure(self.model))

    def still_streamed(self, old_names: Mapping[str, str]) -> dict[str, str]:
        """Return `old_names` without the parameters that have left the engine."""
        if self.engine is None:
            return {}
        gone = {self.engine.store.spec(key).name for key in self.engine.departed}
        return {new: old for new, old in old_names.items() if old not in gone}

    def has_states_for(self, updaters: Updaters, names: Collection[str] | None = None) -> bool:
        """True if the store has the state tensors that these optimizers keep.

        Args:
            updaters: the optimizer of each parameter.
            names: the parameters that are compared; all parameters of the store if not given.
        """
        store, rule = self.present.store, updaters.rule
        specs = (spec for stage in store.stages for spec in stage.params)
        return all(
            rule.state_layout(spec) == store.rule.state_layout(spec)
            for spec in specs
            if names is None or spec.name in names
        )

    def updates_as(self, updaters: Updaters) -> bool:
        """True if the store updates all parameters as these optimizers do, and has their state tensors."""
        return updaters.specs == self.updaters.specs and self.has_states_for(updaters)

    @uninterrupted
    def replace(
        self, plan: Plan, updaters: Updaters, old_names: Mapping[str, str], *, unchanged: bool
    ) -> None:
        """Replace the engine by one with this plan and these optimizers; keep weights and optimizer state.

        The new engine uses the old store if its plan and optimizers need the same kind of store. Otherwise
        the values move to a new store, and until then both stores are in memory. If the new engine cannot be
        built, the old store keeps the values, and the next call of the model makes a new plan.

        Args:
            plan: the plan.
            updaters: the optimizer of each parameter.
            old_names: present name -> name in the old engine, of the parameters that both have.
            unchanged: true if the model has the same structure as for the old engine.
        """
        before = self.engine
        keeps_store = before is not None and unchanged and self._keeps_store(before, plan, updaters)
        initial = before.store if before and keeps_store else self._initial(before, old_names)
        with nullcontext() if before is None else on_failure(before.adopt_again):
            if before is not None:
                # Only one engine at a time may stream a parameter.
                before.detach()
            engine = build_engine(
                self.model, plan, updaters.rule, self._config, initial=initial, fabric=self.fabric
            )
        self.engine = engine
        self._note_store(engine.store)
        engine.when_departed(self._give_back)
        if before is not None:
            if not keeps_store:
                self._move_values(before, engine, old_names)
            # Weights that earlier forwards have saved are found by the indices of their stages.
            same_stages = _parameter_names(before) == _parameter_names(engine)
            # After `_move_values`: it closes an old store that is not used any more.
            before.hand_over(engine, unchanged=unchanged and same_stages)
        # After `_move_values`, which gives states back to the optimizers of the old engine.
        self.updaters = updaters
        self.accept_structure()
        if before is None and self.fabric.num_hosts > 1:
            # Only for the first engine: later ones copy from stores, which are already equal on all hosts.
            take_from_first_host(engine.store, self.fabric)

    def _keeps_store(self, before: Engine, plan: Plan, updaters: Updaters) -> bool:
        """True if an engine with this plan and these optimizers can use the old store, on every rank."""
        keeps = StoreSettings.of(plan) == StoreSettings.of(before.plan) and self.updates_as(updaters)
        # Ranks build a store together, so all of them must build one.
        return all(self.fabric.gather_objects(keeps, bool))

    def _move_values(self, before: Engine, engine: Engine, old_names: Mapping[str, str]) -> None:
        """Move weights and optimizer state from an old engine to a new one.

        Parameters that the model has lost become plain ones.

        Args:
            before: the old engine.
            engine: the new engine.
            old_names: new name -> old name, of the parameters that both have.
        """
        if self.fabric.size > 1:
            before.store.flush()
            # Each rank has the scalars of the parameters that it updates. In the new store it may update
            # other parameters.
            before.store.scalars.share()
        take_over(engine.store, before.store, old_names)
        kept = set(old_names.values())
        for key, param in before.parameters():
            name = before.store.spec(key).name
            if name not in kept and key not in before.departed:
                give_back(before.store, key, param, self.updaters.state_owner_of(name))

    def _initial(self, before: Engine | None, old_names: Mapping[str, str]) -> Initial | None:
        """Return a function that returns initial values; `None` if the parameters already hold them."""
        known = initial_values(self.model)
        if not known and before is None:
            return None
        params = dict(named_parameters_of(self.model))

        def value(spec: ParamSpec) -> torch.Tensor:
            if before is not None and spec.name in old_names:
                return before.master(old_names[spec.name])
            return known[spec.name]() if spec.name in known else params[spec.name].detach()

        return value

    def _give_back(self, key: ParamKey, param: nn.Parameter, device: torch.device = HOST) -> None:
        """Copy value, gradient and optimizer state from the store to a parameter that leaves the store."""
        store = self.present.store
        give_back(store, key, param, self.updaters.state_owner_of(store.spec(key).name), device)

    def update_by(self, updaters: Updaters, fresh: Collection[str]) -> None:
        """Use these optimizers from now on, and drop the optimizer state of the parameters `fresh`.

        Args:
            updaters: the optimizer of each parameter. The store has the state tensors that they keep.
            fresh: names of parameters.
        """
        self.updaters = updaters
        store = self.present.store
        for stage in store.stages:
            scalars = store.scalars.by_stage[stage.index]
            for index, param in enumerate(stage.params):
                if param.name in fresh:
                    scalars[index] = None

    def give_states_back(self, names: Collection[str]) -> None:
        """Copy optimizer state from the store to host memory, before other optimizers take over.

        Args:
            names: names of the parameters.
        """
        store = self.present.store
        for key, param in self.present.parameters():
            name = store.spec(key).name
            optimizer = self.updaters.state_owner_of(name) if name in names else None
            if optimizer is not None:
                give_state_back(store, key, param, optimizer)

    def release(self) -> None:
        """Return values and gradients to the parameters and states to the optimizers, and end the engine.

        All of these, and the model's buffers, are moved to host memory: they may be too large for a GPU.
        """
        if self.engine is None:
            return
        # `detach` comes first: it fills the parameters with NaN. Then they get their values from the store.
        self.engine.detach()
        store = self.engine.store
        warn_of_lost_hooks(((param, store.spec(key)) for key, param in self.engine.parameters()), HOST)
        for key, param in self.engine.parameters():
            # The model has a dummy instead of each departed parameter, and no optimizer updates dummies.
            if key not in self.engine.departed:
                self._give_back(key, param)
        for key, param in self.engine.departed.items():
            move_to_host(param, self.updaters.state_owner_of(self.engine.store.spec(key).name))
        self.engine.buffers.move(HOST)
        self.engine.close()
        self.engine = None


def _parameter_names(engine: Engine) -> list[list[str]]:
    """Return the names of the parameters of each stage."""
    return [[param.name for param in stage.params] for stage in engine.plan.trace.stages]
