"""Tensors of an optimizer's state, such as `exp_avg`, whose values are in the weight store."""

from __future__ import annotations

import dataclasses
import mmap
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from headwater.api.stored_state import Optimizer, layouts_of, set_scalars, stored_scalars
from headwater.core.errors import StreamError
from headwater.core.lazy import LazyTensor
from headwater.core.stage import ParamSpec
from headwater.core.uncompiled import uncompiled
from headwater.store.layout import Scalars
from headwater.stream.at_rest import AtRest, all_of, on_values, pickled_as_plain, tensor_in_memory
from headwater.stream.home import Home, ValuesVersion
from headwater.stream.new_parameters import becomes_parameter_when_marked
from headwater.stream.parameter_memory import KeptHome
from headwater.stream.parameters import ParameterAtRest
from headwater.stream.placeholders import LAYOUT, NotTraced, is_metadata, stand_in


@dataclasses.dataclass(frozen=True)
class _MomentHome:
    """The place of one optimizer state tensor in the store, through which its values are read and written."""

    home: Home
    name: str

    @property
    def spec(self) -> ParamSpec:
        return self.home.spec

    @property
    def meta(self) -> torch.Tensor:
        layout = layouts_of(self.home)[self.name]
        shape = layout.shape_for(self.spec)
        with torch.inference_mode(False):
            meta = torch.empty(shape, dtype=layout.dtype, device="meta")
            return self.spec.like_the_parameter(meta) if shape == self.spec.shape else meta

    @property
    def version(self) -> ValuesVersion:
        return self.home.version

    def read(self) -> torch.Tensor:
        # A tensor made in inference mode could not be used in training later.
        with torch.inference_mode(False):
            return self.read_on_host().to(self.home.device)

    def read_on_host(self) -> torch.Tensor:
        return self.home.store.parameters.read_param(self.home.key, self.name)

    def put_copy_in_file(self, memory: mmap.mmap) -> bool:
        return self.home.put_copy_in_file(memory)

    def write(self, value: torch.Tensor) -> None:
        self.home.store.parameters.write_param(self.home.key, value.detach(), self.name)


class Moment:
    """One optimizer state tensor of a parameter, whose values may be in a store or in the optimizer.

    Attributes:
        kept: the values, after another tensor has replaced this one in the state; `None` before.
    """

    _alive: ClassVar[weakref.WeakValueDictionary[tuple[int, int, str], Moment]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, optimizer: Optimizer, param: torch.nn.Parameter, name: str) -> None:
        # Strong references: while this object exists, no other object can get the ids that are its key in
        # `_alive`.
        self._optimizer, self._param, self._name = optimizer, param, name
        self.kept: torch.Tensor | None = None

    @property
    def param(self) -> Moment:
        """This object itself, because `nn.Parameter(tensor)` copies from the tensor's `source.param`."""
        # Not an attribute: its reference cycle would keep a tensor alive that the program has dropped, and
        # `keep` would copy the values needlessly.
        return self

    @property
    def tensor_name(self) -> tuple[torch.nn.Parameter, str]:
        """The parameter, and the name of the tensor in the parameter's optimizer state."""
        return self._param, self._name

    @classmethod
    def of(cls, optimizer: Optimizer, param: torch.nn.Parameter, name: str) -> Moment:
        """Return the object of a state tensor. While the program holds it, this is always the same object.

        Args:
            optimizer: the optimizer.
            param: the parameter whose state it is in.
            name: the name of the tensor in that state, such as `exp_avg`.
        """
        key = id(optimizer), id(param), name
        return cls._alive.setdefault(key, cls(optimizer, param, name))

    @classmethod
    def keep(cls, optimizer: Optimizer, param: torch.nn.Parameter, name: str) -> None:
        """Copy a state tensor's values for the program that has read it, before the state is replaced.

        Args:
            optimizer: see `of`.
            param: see `of`.
            name: see `of`.
        """
        moment = cls._alive.get((id(optimizer), id(param), name))
        if moment is not None:
            moment.kept = moment.home.read()
            cls._alive.pop((id(optimizer), id(param), name))

    @property
    def home(self) -> Any:
        if self.kept is not None:
            return KeptHome(self.kept, self._name)
        # The store is looked up at each use: the engine may have been released, or built with another store.
        scalars = stored_scalars(self._param, self._optimizer)
        if scalars is None:
            return KeptHome(self._plain(), self._name)
        param: Any = self._param
        if self._name in scalars:
            return KeptHome(scalars[self._name], self._name)
        return _MomentHome(param.home, self._name)

    def _plain(self) -> torch.Tensor:
        """Return the tensor from the optimizer's own state, which is not in a store."""
        state = self._optimizer.state.get(self._param, {})
        if self._name not in state:
            raise StreamError(
                "the program uses a tensor of optimizer state that the optimizer has replaced",
                where=f"optimizer.state[param][{self._name!r}]",
                remedy="take the tensor from optimizer.state again, or clone it before the state is replaced",
            )
        found: torch.Tensor = state[self._name]
        return found


@dataclasses.dataclass(frozen=True)
class _Reading:
    """A function that yields all values of an optimizer state tensor as one piece."""

    moment: Moment

    def __call__(self) -> Iterator[torch.Tensor]:
        home = self.moment.home
        yield home.read_on_host() if isinstance(home, _MomentHome) else home.read()

    def in_memory(self) -> torch.Tensor | None:
        """Return a plain tensor with the values, which is only read; see `LazyTensor`."""
        return tensor_in_memory(self.moment)

    @property
    def place(self) -> tuple[Home, str] | None:
        """The place of the parameter in a store, and the name of the state. See `StoredValues`."""
        home = self.moment.home
        return (home.home, home.name) if isinstance(home, _MomentHome) else None


class MomentAtRest(AtRest, NotTraced):
    """A tensor of an optimizer's state whose values are in the weight store.

    Attributes:
        moment: the tensor of the state.
        meta: a tensor of the same shape, strides and dtype on the meta device.
    """

    moment: Moment
    meta: torch.Tensor
    owner = None
    selection = staticmethod(all_of)
    _is_param = becomes_parameter_when_marked
    __reduce_ex__ = pickled_as_plain

    @property
    def source(self) -> Moment:
        return self.moment

    @classmethod
    def of(cls, optimizer: Optimizer, param: ParameterAtRest, name: str, scalars: Scalars) -> MomentAtRest:
        """Return the optimizer state tensor called `name` of a parameter, without reading its values.

        Args:
            optimizer: the optimizer that has the state in the store.
            param: the parameter.
            name: the name of the tensor in the state.
            scalars: the scalars of the state, by name.
        """
        home = param.home
        with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
            if name in scalars:
                like = scalars[name]
                meta = torch.empty((), dtype=like.dtype, device="meta")
            else:
                meta = _MomentHome(home, name).meta
                like = torch.empty((), dtype=meta.dtype, device=home.device)
            found = stand_in(cls, meta.shape, like)
        found.moment = Moment.of(optimizer, param, name)
        found.meta = meta
        return found

    @property
    def home(self) -> Any:  # type: ignore[override]
        return self.moment.home

    @classmethod
    @uncompiled
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in LAYOUT:
                return func(args[0].meta, *args[1:], **(kwargs or {}))
            if is_metadata(func):
                return func(*args, **(kwargs or {}))
            return on_values(func, args, kwargs or {})


def lazy_state(optimizer: Optimizer, param: ParameterAtRest) -> dict[str, Any]:
    """Return the optimizer state of a parameter. Its tensors are read from the store when they are used."""
    scalars = stored_scalars(param, optimizer)
    if scalars is None:
        return {}

    def lazy(name: str, meta: torch.Tensor) -> LazyTensor:
        reading = _Reading(Moment.of(optimizer, param, name))
        return LazyTensor(reading, meta.shape, meta.dtype, strides=meta.stride())

    # Scalar tensors too, such as the number of steps: when entries are read, all must be of the same step.
    lazy_scalars = {
        name: lazy(name, value) if isinstance(value, torch.Tensor) else value
        for name, value in scalars.items()
    }
    moments = {name: lazy(name, _MomentHome(param.home, name).meta) for name in layouts_of(param.home)}
    return lazy_scalars | moments


def is_stored_state(state: Mapping[str, Any], optimizer: Optimizer, param: ParameterAtRest) -> bool:
    """Return true if all tensors of `state` are the ones that the store has for this parameter now.

    Args:
        state: a state, such as one of a `state_dict`.
        optimizer: the optimizer that has the state in the store.
        param: the parameter.
    """
    scalars = stored_scalars(param, optimizer)
    if scalars is None or state.keys() != {*scalars, *layouts_of(param.home)}:
        return False
    present = [_Reading(Moment.of(optimizer, param, name)) for name in layouts_of(param.home)]
    found = [getattr(state[name], "read_pieces", None) for name in layouts_of(param.home)]
    return found == present


def drop_stored(optimizer: Optimizer, param: ParameterAtRest) -> None:
    """Discard the optimizer state that a store has for a parameter. The next update begins a new state."""
    scalars = stored_scalars(param, optimizer)
    if scalars is not None:
        for name in [*scalars, *layouts_of(param.home)]:
            Moment.keep(optimizer, param, name)
        set_scalars(param.home, None)
