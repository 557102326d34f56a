"""The state of optimizers over streamed parameters: mappings that read and write the weight store.

[Note: optimizer state]
`optimizer.state` is an ordinary dictionary until the optimizer's first step over streamed parameters. Then it
becomes an `OptimizerState`, and the state of each streamed parameter a `ParamState`. Both show what the store
has. A state is either in the store, or in its `ParamState`. Some states do not fit into the store: a moment
of another shape, or a state that lacks a moment. Such a state is taken out of the store. The next step puts
it back or refuses it.

A loop may also assign another mapping to `optimizer.state`. Nothing notices this at once. So every function
that uses the state in a store looks first whether the mapping is still the installed one.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import torch

from headwater.api.registry import find_model, model_of
from headwater.api.updaters import installed_states, is_state_replaced
from headwater.core.errors import CheckpointError, StreamError
from headwater.core.lazy import LazyTensor
from headwater.core.stage import ParamSpec
from headwater.store.layout import StateLayout
from headwater.store.rule import Scalars
from headwater.stream.at_rest import (
    LAYOUT,
    AtRest,
    all_of,
    becomes_parameter_when_marked,
    is_metadata,
    on_values,
    stand_in,
)
from headwater.stream.home import Home
from headwater.stream.kept import KeptHome
from headwater.stream.parameters import ParameterAtRest

Optimizer = torch.optim.Optimizer


def params_of(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def is_served(param: object, optimizer: Optimizer) -> TypeGuard[ParameterAtRest]:
    """True if the state that a store has for a parameter is this optimizer's."""
    if not isinstance(param, ParameterAtRest):
        return False
    model = find_model(param.home.store)
    return model is not None and model.optimizers.is_updated_by(param, optimizer)


def stored_scalars(param: object, optimizer: Optimizer) -> Scalars | None:
    """Return the scalars of a state that is in a store, or None if no store has a state."""
    if not is_served(param, optimizer):
        return None
    home = param.home
    home.store.flush_stage(home.stage)
    model_of(home.store).steps.share_scalars()
    scalars = home.store.scalars.of(home.stage)[home.index]
    return scalars if scalars or _layouts(home) else None  # SGD without momentum has no state


def lazy_state(optimizer: Optimizer, param: ParameterAtRest) -> dict[str, Any]:
    """Return the state of a parameter, with tensors that are read when they are used."""
    scalars = stored_scalars(param, optimizer)
    if scalars is None:
        return {}

    def lazy(name: str) -> LazyTensor:
        layout = _layouts(param.home)[name]
        shape = param.shape if layout.shape is None else layout.shape
        return LazyTensor(_Reading(_Moment.of(optimizer, param, name)), shape, layout.dtype)

    return {**scalars, **{name: lazy(name) for name in _layouts(param.home)}}


def is_present(state: Mapping[str, Any], optimizer: Optimizer, param: ParameterAtRest) -> bool:
    """True if the tensors of a state are those that the store has for this parameter now."""
    scalars = stored_scalars(param, optimizer)
    if scalars is None or state.keys() != {*scalars, *_layouts(param.home)}:
        return False
    present = [_Reading(_Moment.of(optimizer, param, name)) for name in _layouts(param.home)]
    found = [getattr(state[name], "read_pieces", None) for name in _layouts(param.home)]
    return found == present


def _layouts(home: Home) -> StateLayout:
    return home.store.rule.state_layout(home.spec)


def store_state(home: Home, state: Mapping[str, Any]) -> None:
    """Replace the optimizer state of one parameter in the store.

    Raises:
        CheckpointError: if the state is of another optimizer or another shape, or has no values.
    """
    layouts = _layouts(home)
    tensors = {
        name: value  # state tensors of a 0-dimensional parameter have no dimensions
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and (value.dim() > 0 or name in layouts)
    }
    if tensors.keys() != layouts.keys():
        raise CheckpointError(
            f"the optimizer state has {sorted(tensors)}, and this optimizer keeps {sorted(layouts)}",
            where=home.spec.name,
            remedy="load the state of the same kind of optimizer, or assign all of these tensors",
        )
    for name, value in tensors.items():
        shape = home.spec.shape if layouts[name].shape is None else layouts[name].shape
        if tuple(value.shape) != tuple(shape or ()):
            raise CheckpointError(
                f"the optimizer state {name!r} has shape {list(value.shape)}, expected {list(shape or ())}",
                where=home.spec.name,
                remedy="assign a tensor of the expected shape, or delete the state with pop",
            )
    if any(value.is_meta for value in tensors.values()):
        raise CheckpointError(
            "the optimizer state was loaded while its parameters were empty, and torch dropped the values",
            where=home.spec.name,
            remedy="load it after the model's first forward, or build the model within backend.device",
        )
    for name, value in tensors.items():
        home.store.parameters.write_param(home.key, value.detach(), name)
    set_scalars(home, {k: v for k, v in state.items() if k not in tensors})


def set_scalars(home: Home, value: Scalars | None) -> None:
    scalars = list(home.store.scalars.of(home.stage))
    scalars[home.index] = value
    home.store.scalars.replace(home.stage, scalars)


# tensors of a state


@dataclasses.dataclass(frozen=True)
class _MomentHome:
    """The place of a state tensor that is in the store."""

    home: Home
    name: str

    @property
    def spec(self) -> ParamSpec:
        return self.home.spec

    def read(self) -> torch.Tensor:
        with torch.inference_mode(False):
            return self.home.store.parameters.read_param(self.home.key, self.name).to(self.home.device)

    def write(self, value: torch.Tensor) -> None:
        self.home.store.parameters.write_param(self.home.key, value.detach(), self.name)


class _Moment:
    """A tensor of the state of one parameter, in a store or not. It lives while something refers to it.

    Attributes:
        kept: the values, after another tensor has replaced this one in the state; `None` before.
    """

    _alive: ClassVar[weakref.WeakValueDictionary[tuple[int, int, str], _Moment]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, optimizer: Optimizer, param: torch.nn.Parameter, name: str) -> None:
        self._optimizer, self._param, self._name = optimizer, param, name
        self.param = self  # `nn.Parameter(tensor)` copies it
        self.kept: torch.Tensor | None = None

    @classmethod
    def of(cls, optimizer: Optimizer, param: torch.nn.Parameter, name: str) -> _Moment:
        """Return the tensor that the state has now."""
        key = id(optimizer), id(param), name
        return cls._alive.setdefault(key, cls(optimizer, param, name))

    @classmethod
    def keep(cls, optimizer: Optimizer, param: torch.nn.Parameter, name: str) -> None:
        """Give tensors that were read from the state a copy of the present values, before these change."""
        moment = cls._alive.get((id(optimizer), id(param), name))
        if moment is not None:
            moment.kept = moment.home.read()
            cls._alive.pop((id(optimizer), id(param), name))

    @property
    def home(self) -> Any:
        if self.kept is not None:
            return KeptHome(self.kept, self._name)
        scalars = stored_scalars(self._param, self._optimizer)
        if scalars is None:
            return KeptHome(self._plain(), self._name)
        param: Any = self._param
        if self._name in scalars:
            return KeptHome(scalars[self._name], self._name)
        return _MomentHome(param.home, self._name)

    def _plain(self) -> torch.Tensor:
        """Return the tensor that the optimizer itself has."""
        state = self._optimizer.state.get(self._param, {})
        if self._name not in state:
            raise StreamError(
                "a tensor of the state of an optimizer is used that the optimizer does not have any more",
                where=f"optimizer.state[param][{self._name!r}]",
                remedy="take the tensor from optimizer.state again, or clone it before the state is replaced",
            )
        found: torch.Tensor = state[self._name]
        return found


@dataclasses.dataclass(frozen=True)
class _Reading:
    """Reads a moment in one piece."""

    moment: _Moment

    def __call__(self) -> Iterator[torch.Tensor]:
        yield self.moment.home.read()


class MomentAtRest(AtRest, torch.Tensor):
    """A tensor of an optimizer's state whose values are in the weight store.

    Attributes:
        moment: the tensor of the state.
        meta: a tensor of the same shape and strides on the meta device.
    """

    moment: _Moment
    meta: torch.Tensor
    owner = None
    selection = staticmethod(all_of)
    _is_param = becomes_parameter_when_marked

    @property
    def source(self) -> _Moment:
        return self.moment

    @classmethod
    def of(cls, optimizer: Optimizer, param: ParameterAtRest, name: str, scalars: Scalars) -> MomentAtRest:
        """Return the tensor with this name of the state of a parameter."""
        home = param.home
        if name in scalars:
            like, shape = scalars[name], torch.Size()
        else:
            layout = _layouts(home)[name]
            like = torch.empty((), dtype=layout.dtype, device=home.device)
            shape = param.shape if layout.shape is None else torch.Size(layout.shape)
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
            found = stand_in(cls, shape, like)
            meta = torch.empty(shape, device="meta")
        found.moment = _Moment.of(optimizer, param, name)
        found.meta = home.spec.like_the_parameter(meta) if tuple(shape) == home.spec.shape else meta
        return found

    @property
    def home(self) -> Any:  # type: ignore[override]
        return self.moment.home

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in LAYOUT:
                return func(args[0].meta, *args[1:], **(kwargs or {}))
            if is_metadata(func):
                return func(*args, **(kwargs or {}))
            return on_values(func, args, kwargs or {})


# mappings

if TYPE_CHECKING:
    _Dictionary = MutableMapping[Any, Any]
else:

    class _Dictionary(MutableMapping, dict):
        """A mapping that is an instance of `dict`. The storage of the `dict` itself stays empty."""


class ParamState(_Dictionary):
    """The state of one parameter; see [Note: optimizer state].

    Args:
        states: the mapping of all states of the optimizer.
        param: the parameter.
    """

    def __init__(self, states: OptimizerState, param: torch.nn.Parameter) -> None:
        self._own: dict[Any, Any] = {}
        self._states, self._param = states, param
        self._is_removed = False

    def _stored(self) -> Scalars | None:
        """Return the scalars if the store has this state."""
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
        if name not in scalars and name not in _layouts(param.home):
            raise KeyError(name)
        return MomentAtRest.of(optimizer, param, name, scalars)

    def __setitem__(self, name: str, value: Any) -> None:
        scalars = self._stored()
        if scalars is None:
            self._own[name] = value
            return
        optimizer, param = self._in_store()
        moment = _Moment.of(optimizer, param, name)
        if isinstance(value, MomentAtRest) and value.moment is moment:
            return  # `state[name] += 1` has written already
        layout = _layouts(param.home).get(name)
        is_tensor = isinstance(value, torch.Tensor) and value.dim() > 0
        shape = param.shape if layout is None or layout.shape is None else layout.shape
        if is_tensor != (layout is not None) or (is_tensor and tuple(value.shape) != tuple(shape)):
            self._states.take_out(self)
            self._own[name] = value
            return
        if layout is not None or name in scalars:
            _Moment.keep(optimizer, param, name)
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
        return iter([*scalars, *_layouts(self._in_store()[1].home)])

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
        moment = _Moment.of(*self._in_store(), name)
        moment.kept = moment.home.read()
        return moment.kept

    def remove(self) -> None:
        """Move the state into this mapping and detach it: the optimizer gets another for the parameter."""
        self.take_out()
        self._is_removed = True

    def put(self, state: Mapping[str, Any]) -> None:
        """Replace the entries that are in this mapping and not in the store."""
        self._own = dict(state.items())

    def own(self) -> dict[str, Any]:
        """Return the entries that are in this mapping and not in the store."""
        return dict(self._own)

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        values = {k: v.clone() if isinstance(v, MomentAtRest) else v for k, v in self.items()}
        return dict, (values,)

    def __or__(self, other: Any) -> Any:
        return self.copy() | dict(other)

    def __ror__(self, other: Any) -> Any:
        return dict(other) | self.copy()

    def __reversed__(self) -> Iterator[str]:
        return iter([*self][::-1])

    def __repr__(self) -> str:
        return repr(self.copy())


def drop_stored(optimizer: Optimizer, param: ParameterAtRest) -> None:
    """Drop the state that a store has for a parameter; the next update begins a new one."""
    scalars = stored_scalars(param, optimizer)
    if scalars is not None:
        for name in [*scalars, *_layouts(param.home)]:
            _Moment.keep(optimizer, param, name)
        set_scalars(param.home, None)


class OptimizerState(_Dictionary):
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
        """The optimizer; `None` after the optimizer got another mapping."""
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
        """Move the state of one parameter from the store into its mapping."""
        view.take_out()
        self._own[view.param] = view

    def retire(self) -> None:
        """Move all states from stores into this mapping; the optimizer has another one."""
        for param in [key for key in self if isinstance(key, ParameterAtRest)]:
            if self.stored(param) is not None:
                view = self._view(param)
                self.take_out(view)
                view.remove()
        self._is_installed = False

    def store(self) -> None:
        """Move the states of streamed parameters to their stores, before a step.

        Raises:
            CheckpointError: if a state is not complete.
        """
        optimizer = self.optimizer
        for param in [] if optimizer is None else params_of(optimizer):
            self._stepped.setdefault(id(param), param)
        for param in [key for key in self._own if isinstance(key, ParameterAtRest)]:
            if not param.home.spec.requires_grad:
                continue  # a store keeps the states of trained parameters only
            state = self._own[param]
            own = state.own() if isinstance(state, ParamState) else dict(state)
            if own:
                store_state(param.home, own)
                self._own.pop(param)
            if own and isinstance(state, ParamState):
                state.put({})
            elif not isinstance(state, ParamState):
                self._own.pop(param, None)

    def receive(self, param: torch.nn.Parameter, state: Mapping[str, Any]) -> None:
        """Keep a state that leaves the store in this mapping."""
        view = self._views.get(id(param))
        if view is not None:
            view.put(state)
        self._own[param] = dict(state) if view is None else view

    def load(self, param: ParameterAtRest, state: Mapping[str, Any] | None) -> None:
        """Replace the state of a parameter by a loaded one, in the store."""
        optimizer = self.optimizer
        assert optimizer is not None, "a mapping that is not installed loads nothing"
        if state is not None and is_present(state, optimizer, param):
            names = stored_scalars(param, optimizer) or {}
            set_scalars(param.home, {name: state[name] for name in names})
            return
        self._remove(param)
        if state:
            store_state(param.home, state)

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self:
            if default:
                return default[0]
            raise KeyError(key)
        value = self[key]
        del self[key]
        return value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def clear(self) -> None:
        for key in list(self):
            del self[key]

    def copy(self) -> defaultdict[Any, Any]:
        return defaultdict(dict, dict(self.items()))

    __copy__ = copy

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self.items()))

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        return self

    def __reversed__(self) -> Iterator[Any]:
        return iter([*self][::-1])

    def __repr__(self) -> str:
        return repr(self.copy())


def install(optimizer: Optimizer) -> OptimizerState:
    """Make `optimizer.state` a mapping that reads and writes stores, and return it.

    If the user has assigned another mapping, the states in stores first move to the former mapping.
    """
    if is_state_replaced(optimizer):
        _retire(optimizer)
    elif isinstance(optimizer.state, OptimizerState):
        return optimizer.state
    return _installed(optimizer)


def reinstall(optimizer: Optimizer) -> None:
    """Make `optimizer.state`, which torch has replaced, one that reads and writes the same stores."""
    if is_state_replaced(optimizer):
        _installed(optimizer)


def _installed(optimizer: Optimizer) -> OptimizerState:
    new = OptimizerState(optimizer, optimizer.state)
    optimizer.state = new  # type: ignore[assignment]
    installed_states[optimizer] = weakref.ref(new)
    return new


def _retire(optimizer: Optimizer) -> None:
    before = installed_states[optimizer]()
    if isinstance(before, OptimizerState):
        before.retire()
    for param in params_of(optimizer):
        if isinstance(param, ParameterAtRest):
            drop_stored(optimizer, param)
