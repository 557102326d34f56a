"""The state of one parameter in `optimizer.state`; see [Note: optimizer state]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, final

import torch

from headwater.api.dictionary import Dictionary
from headwater.api.moments import Moment, MomentAtRest, drop_stored
from headwater.api.stored_state import Optimizer, layouts_of, set_scalars
from headwater.store.layout import Scalars
from headwater.stream.parameters import ParameterAtRest


class States(Protocol):
    """Interface: the part of `OptimizerState` that `ParamState` uses."""

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer whose state this is. `None` after `optimizer.state` was set to another mapping."""

    def stored(self, key: object) -> Scalars | None:
        """Return the scalars of a parameter whose state is in a store; `None` for any other key."""

    def take_out(self, view: ParamState) -> None:
        """Move the state of one parameter from the store to host memory, into `view`."""


@final
class ParamState(Dictionary):
    """The state of one parameter; see [Note: optimizer state].

    Args:
        states: the mapping of all states of the optimizer.
        param: the parameter.
    """

    def __init__(self, states: States, param: torch.nn.Parameter) -> None:
        self._own: dict[Any, Any] = {}
        self._states, self._param = states, param
        self._is_removed = False

    def _stored(self) -> Scalars | None:
        """Return the scalars of this state if the store has it, otherwise `None`."""
        return None if self._is_removed else self._states.stored(self._param)

    def _in_store(self) -> tuple[Optimizer, ParameterAtRest]:
        optimizer = self._states.optimizer
        assert optimizer is not None and isinstance(self._param, ParameterAtRest), "the store has the state"
        return optimizer, self._param

    def __getitem__(self, name: str) -> Any:
        scalars = self._stored()
        if scalars is None:
            return self._own[name]
        optimizer, param = self._in_store()
        if name in scalars and not isinstance(scalars[name], torch.Tensor):
            return scalars[name]
        if name not in scalars and name not in layouts_of(param.home):
            raise KeyError(name)
        return MomentAtRest.of(optimizer, param, name, scalars)

    def __setitem__(self, name: str, value: Any) -> None:
        scalars = self._stored()
        if scalars is None:
            self._own[name] = value
            return
        optimizer, param = self._in_store()
        moment = Moment.of(optimizer, param, name)
        if isinstance(value, MomentAtRest) and value.moment is moment:
            return  # `state[name] += 1` has written already
        layout = layouts_of(param.home).get(name)
        is_tensor = isinstance(value, torch.Tensor) and value.dim() > 0
        shape = None if layout is None else layout.shape_for(param.home.spec)
        if is_tensor != (layout is not None) or (is_tensor and tuple(value.shape) != shape):
            self._states.take_out(self)
            self._own[name] = value
            return
        if layout is not None or name in scalars:
            # Before the write: a program that has read the old tensor keeps its values, as in plain PyTorch.
            Moment.keep(optimizer, param, name)
        if layout is not None:
            param.home.store.parameters.write_param(param.home.key, value.detach(), name)
        else:
            set_scalars(param.home, {**scalars, name: value})

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._states.take_out(self)
        del self._own[name]

    def __iter__(self) -> Iterator[str]:
        scalars = self._stored()
        if scalars is None:
            return iter(self._own)
        return iter([*scalars, *layouts_of(self._in_store()[1].home)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return name in list(iter(self))

    @property
    def param(self) -> torch.nn.Parameter:
        return self._param

    def take_out(self) -> None:
        """Move the state from the store into this mapping."""
        scalars = self._stored()
        if scalars is None:
            return
        optimizer, param = self._in_store()
        for name in list(self):
            self._own[name] = self._taken(name, scalars)
        drop_stored(optimizer, param)

    def _taken(self, name: str, scalars: Scalars) -> Any:
        if name in scalars:
            return scalars[name]
        moment = Moment.of(*self._in_store(), name)
        # One memory for this mapping and for a program that has read the tensor: both see later changes.
        moment.kept = moment.home.read()
        return moment.kept

    def remove(self) -> None:
        """Move the state into this mapping, and end the link to the optimizer. Called when it is replaced."""
        self.take_out()
        # This is the last statement: a state that is marked as removed is not looked up in the store.
        self._is_removed = True

    def put(self, state: Mapping[str, Any]) -> None:
        """Replace the state that this mapping holds. The state in the store does not change."""
        self._own = dict(state.items())

    def own(self) -> dict[str, Any]:
        """Return the entries that this mapping itself holds. It is empty while the store holds the state."""
        return dict(self._own)

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        # These are clones: a copy must not follow later changes in the store.
        values = {k: v.clone() if isinstance(v, MomentAtRest) else v for k, v in self.items()}
        return dict, (values,)
