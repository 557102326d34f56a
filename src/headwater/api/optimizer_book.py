"""The optimizers of a streamed model's parameters, and the layout of the store that their states need."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, final

import torch

from headwater.api.updaters import Updaters
from headwater.core.errors import StreamError
from headwater.core.stage import ParamKey
from headwater.optim.probe import state_tensors
from headwater.stream.parameters import ParameterAtRest

if TYPE_CHECKING:
    from headwater.api.engine_swap import ReplaceableEngine
    from headwater.api.step_participant import StreamedSteps


@final
class OptimizerBook:
    """Tracks which optimizers update a streamed model, and changes the store if their state needs it.

    If the states need another layout, the engine is replaced by one with the same plan.

    Args:
        current_engine: the engine of the model.
        steps: exchanges the scalars of ranks.
    """

    def __init__(self, current_engine: ReplaceableEngine, steps: StreamedSteps) -> None:
        self._current = current_engine
        self._steps = steps

    def is_updated_by(self, param: ParameterAtRest, optimizer: torch.optim.Optimizer) -> bool:
        """True if the optimizer state that the store has for a parameter belongs to `optimizer`."""
        return self._current.updaters.updater_of(param.home.spec.name) is optimizer

    def update_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that `optimizer` updates those of its parameters that are in this model.

        If another optimizer has updated a parameter before, the parameter begins without state. Otherwise its
        state is adapted to the options of its group.

        Args:
            optimizer: an optimizer that is about to step, or whose state is asked for.

        Raises:
            ConfigError: if streaming cannot serve the optimizer, or the options of a group.
        """
        names = self._current.structure.names
        updaters = self._current.updaters.copy()
        fresh = updaters.note(optimizer, names)
        if fresh:
            self._settle()
            # Before `_update_by`: the states still belong to the former optimizers.
            self._current.give_states_back(fresh)
            self._update_by(updaters, fresh, rebuild=self._needs_another_store(updaters, fresh))
        self._follow_options(optimizer, names)

    def _needs_another_store(self, updaters: Updaters, fresh: Collection[str]) -> bool:
        """True if the present store cannot update its trained parameters by `updaters`.

        The store does not update frozen parameters, or those that have left it since the plan was made.
        """
        engine, before, after = self._current.present, self._current.updaters.specs, updaters.specs
        specs = {engine.store.spec(key) for key, _ in engine.parameters() if key not in engine.departed}
        names = {spec.name for spec in specs if spec.requires_grad}
        has_changed = any(before.get(name) != after.get(name) for name in names)
        return has_changed or not self._current.has_states_for(updaters, names.intersection(fresh))

    def give_up(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the state of an optimizer, which steps in the loop from now on, to host memory."""
        updaters = self._current.updaters
        names = {name for name in updaters.specs if updaters.updater_of(name) is optimizer}
        if not names:
            return
        self._settle()
        self._current.give_states_back(names)
        others = updaters.without(names)
        self._update_by(others, names, rebuild=not self._current.has_states_for(others, names))

    def _settle(self) -> None:
        """Apply all pending updates, and copy all optimizer scalars to this rank."""
        self._current.present.store.flush()
        self._steps.share_scalars()

    def _follow_options(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        """Adapt the optimizer state of parameters whose parameter group has other options than before.

        A parameter without state so far begins a new one. The decision is the same on all ranks.

        Raises:
            ConfigError: if a state lacks a tensor that the optimizer needs now.
        """
        changed = self._current.updaters.changed(optimizer, names)
        if not changed:
            return
        self._settle()
        engine = self._current.present
        store = engine.store
        updaters, began = self._current.updaters.copy(), set()
        for key, _ in engine.parameters():
            spec, scalars = store.spec(key), store.scalars.by_stage[key[0]][key[1]]
            if spec.name not in changed:
                continue
            if scalars is not None and (scalars or store.rule.state_layout(spec)):
                updaters.keep_state(spec, changed[spec.name])
            else:
                updaters.begin_state(spec.name, changed[spec.name])
                began.add(spec.name)
        self._update_by(updaters, began, rebuild=not self._current.has_states_for(updaters, began))

    def expect_states(self, loaded: Mapping[ParamKey, tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
        """Change the layout of the store so that optimizer states that are about to be loaded fit in.

        If the layout of a parameter's state changes, its present state is dropped.

        Args:
            loaded: parameter -> the options of its group and its state, as they were saved.
        """
        store = self._current.present.store
        updaters, others = self._current.updaters.copy(), set()
        for key, (options, state) in loaded.items():
            updaters.expect_state(store.spec(key).name, options, state)
        rule = updaters.rule
        # A second loop, because the rule has the options of all parameters only after the first loop.
        for key, (_, state) in loaded.items():
            spec, tensors = store.spec(key), state_tensors(state)
            if rule.state_layout(spec).keys() != tensors.keys():
                return  # loading this state will raise an error: keep the present states
            if rule.state_layout(spec) != store.rule.state_layout(spec):
                others.add(spec.name)
        if others:
            self._update_by(updaters, others, rebuild=True)

    def _update_by(self, updaters: Updaters, fresh: Collection[str], *, rebuild: bool) -> None:
        """Use `updaters` from now on, and begin the state of the parameters `fresh`.

        Args:
            updaters: the optimizers.
            fresh: the parameters whose present state is dropped.
            rebuild: true if the store needs another layout.
        """
        if rebuild:
            # This call is first: it may raise an error, and it needs the present owners of the states.
            self._rebuild(updaters)
        self._current.update_by(updaters, fresh)

    def _rebuild(self, updaters: Updaters) -> None:
        """Replace the engine by one with the same plan, whose store has the layout for these optimizers.

        Raises:
            StreamError: if a parameter has left the engine and the model has not been planned since then.
        """
        engine, structure = self._current.present, self._current.structure
        if engine.departed:
            raise StreamError(
                "a parameter got another shape or dtype between the backward and the step",
                where=engine.store.spec(next(iter(engine.departed))).name,
                remedy="change the parameter after optimizer.step(), or call the model again before the step",
            )
        with structure.restored():  # the next forward must still see the user's changes
            same = {name: name for name in structure.names.values()}
            self._current.replace(engine.plan, updaters, same, unchanged=True)
