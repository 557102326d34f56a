"""The mapping that replaces `optimizer.state`: it reads and writes optimizer state in weight stores.

[Note: optimizer state]
`optimizer.state` is an ordinary dictionary until the optimizer's first step over streamed parameters. Then it
becomes an `OptimizerState`, and the state of each streamed parameter a `ParamState`. Both show what the store
has. A state is either in the store, or in its `ParamState`. Some states do not fit into the store: a moment
of another shape, or a state that lacks a moment. Such a state is taken out of the store. The next step puts
it back, or raises an error if it still does not fit.

A loop may also assign another mapping to `optimizer.state`, which no hook notices. So every function that
uses the state in a store first checks that the mapping is still the installed one.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch

from headwater.api.dictionary import Dictionary
from headwater.api.moments import drop_stored, is_stored_state
from headwater.api.optimizer_record import is_state_replaced, record_of
from headwater.api.param_state import ParamState
from headwater.api.stored_state import (
    Optimizer,
    check_storable,
    params_of,
    set_scalars,
    store_state,
    stored_scalars,
)
from headwater.optim.catalog import is_known
from headwater.store.layout import Scalars
from headwater.stream.parameters import ParameterAtRest


@final
class OptimizerState(Dictionary):
    """The mapping `optimizer.state`; see [Note: optimizer state].

    Args:
        optimizer: the optimizer that has this state.
        state: its present entries, without those in stores.
    """

    def __init__(self, optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
        self._own: dict[Any, Any] = dict(state.items())
        self._reference = weakref.ref(optimizer)
        self._is_installed = True
        self._stepped: dict[int, torch.nn.Parameter] = {}
        self._views: weakref.WeakValueDictionary[int, ParamState] = weakref.WeakValueDictionary()

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer whose state this is. `None` after `optimizer.state` was set to another mapping."""
        return self._reference() if self._is_installed else None

    def stored(self, key: object) -> Scalars | None:
        """Return the scalars of a parameter whose state is in a store; `None` for any other key."""
        optimizer = self.optimizer
        return None if optimizer is None else stored_scalars(key, optimizer)

    def __contains__(self, key: object) -> bool:
        return key in self._own or self.stored(key) is not None

    def __iter__(self) -> Iterator[Any]:
        own = {id(key): key for key in self._own}
        for param in list(self._stepped.values()):
            if own.pop(id(param), None) is not None or self.stored(param) is not None:
                yield param
        yield from own.values()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, key: Any) -> Any:
        if key in self._own:
            return self._own[key]
        if not isinstance(key, ParameterAtRest):
            return self._own.setdefault(key, {})
        view = self._view(key)
        if self.stored(key) is None:
            self._own[key] = view
        return view

    def _view(self, param: ParameterAtRest) -> ParamState:
        view = self._views.get(id(param))
        if view is None:
            view = self._views[id(param)] = ParamState(self, param)
        return view

    def __setitem__(self, key: Any, value: Any) -> None:
        view = self._views.get(id(key))
        if view is not None and view is value:
            return
        if isinstance(key, ParameterAtRest):
            self._remove(key)
        self._own[key] = value

    def __delitem__(self, key: Any) -> None:
        if key not in self:
            raise KeyError(key)
        if isinstance(key, ParameterAtRest):
            self._remove(key)
        self._own.pop(key, None)

    def _remove(self, param: ParameterAtRest) -> None:
        view = self._views.pop(id(param), None)
        if view is not None:
            view.remove()
        self._own.pop(param, None)
        self._stepped.pop(id(param), None)
        if self.optimizer is not None:
            drop_stored(self.optimizer, param)

    def take_out(self, view: ParamState) -> None:
        """Move the state of one parameter from the store to host memory, into `view`."""
        view.take_out()
        self._own[view.param] = view

    def move_to_host(self) -> None:
        """Move all states from stores into this mapping. Called when the optimizer gets another mapping."""
        for param in [key for key in self if isinstance(key, ParameterAtRest)]:
            if self.stored(param) is not None:
                view = self._view(param)
                self.take_out(view)
                view.remove()
        # This is the last statement, because `stored` finds nothing in a mapping that is not installed.
        self._is_installed = False

    def store(self) -> None:
        """Move the states of streamed parameters to their stores, before a step.

        Raises:
            CheckpointError: if a state is not complete.
        """
        optimizer = self.optimizer
        for param in [] if optimizer is None else params_of(optimizer):
            # `setdefault` keeps the order, because torch lists states in the order of the first steps.
            self._stepped.setdefault(id(param), param)
        for param in self._trained():
            state, own = self._own[param], _held(self._own[param])
            if own:
                store_state(param.home, own)
                # After the store has accepted the state: a state that is refused stays here.
                self._own.pop(param)
            if own and isinstance(state, ParamState):
                state.put({})
            elif not isinstance(state, ParamState):
                self._own.pop(param, None)

    def check_storable(self) -> None:
        """Raise `ConfigError` if plain PyTorch accepts a state for which a store has no place."""
        optimizer = self.optimizer
        assert optimizer is not None, "a mapping that is not installed has nothing to store"
        known = is_known(type(optimizer))
        for param in self._trained():
            check_storable(param.home, _held(self._own[param]), known=known)

    def _trained(self) -> list[ParameterAtRest]:
        """Return the parameters whose state is here, without those that are frozen: no store keeps these."""
        streamed = [key for key in self._own if isinstance(key, ParameterAtRest)]
        return [param for param in streamed if param.home.spec.requires_grad]

    def receive(self, param: torch.nn.Parameter, state: Mapping[str, Any]) -> None:
        """Hold the state of a parameter that leaves the store."""
        view = self._views.get(id(param))
        if view is not None:
            view.put(state)
        self._own[param] = dict(state) if view is None else view

    def load(self, param: ParameterAtRest, state: Mapping[str, Any] | None) -> None:
        """Replace the state of a parameter by a loaded one, in the store."""
        optimizer = self.optimizer
        assert optimizer is not None, "a mapping that is not installed loads nothing"
        if state is not None and is_stored_state(state, optimizer, param):
            # The tensors of `state` are read from this store, so they are there already.
            names = stored_scalars(param, optimizer) or {}
            set_scalars(param.home, {name: state[name] for name in names})
            return
        self._remove(param)
        if state:
            store_state(param.home, state)

    def copy(self) -> defaultdict[Any, Any]:
        return defaultdict(dict, dict(self.items()))

    __copy__ = copy

    def __reduce__(self) -> Any:
        # The class of torch's own state: a pickle must load in a program without this package.
        return defaultdict, (dict, dict(self.items()))


def _held(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a parameter's state that are in no store."""
    return state.own() if isinstance(state, ParamState) else dict(state)


def install(optimizer: Optimizer) -> OptimizerState:
    """Make `optimizer.state` a mapping that reads and writes stores, and return it.

    If the user has assigned another mapping, the states in stores first move to the former mapping.
    """
    state: Any = optimizer.state
    if is_state_replaced(optimizer):
        _move_states_out(optimizer)
    elif isinstance(state, OptimizerState):
        return state
    return _installed(optimizer)


def reinstall(optimizer: Optimizer) -> None:
    """Set `optimizer.state`, which torch has replaced, to a mapping that reads and writes stores again."""
    if is_state_replaced(optimizer):
        _installed(optimizer)


def _installed(optimizer: Optimizer) -> OptimizerState:
    new = OptimizerState(optimizer, optimizer.state)
    optimizer.state = new  # type: ignore[assignment]
    record_of(optimizer).state = weakref.ref(new)
    return new


def _move_states_out(optimizer: Optimizer) -> None:
    """Move the states from stores into the old mapping, because the user has assigned another one."""
    installed = record_of(optimizer).state
    before = None if installed is None else installed()
    if isinstance(before, OptimizerState):
        before.move_to_host()
    for param in params_of(optimizer):
        if isinstance(param, ParameterAtRest):
            drop_stored(optimizer, param)
