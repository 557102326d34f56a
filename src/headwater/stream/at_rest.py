"""Operations on tensors whose values are in the weight store: read before, written back after.

[Note: parameters at rest]
Inside the forward of its module a parameter is a plain `nn.Parameter` over a slab. Between forwards the same
object has the class `ParameterAtRest`, which sees every torch operation on it: shapes and dtypes are answered
at once, values are read from the store, what an operation writes goes back to the store, and gradients go to
where the others are. What is a view of a parameter in plain PyTorch (`param.data`, `param[0]`, …) is a
`PartAtRest`, for which the same holds. So nothing can read a weight that is not there, wherever a model or a
loop does it, and nothing that is written is lost.

[Note: new parameters]
`nn.Parameter(tensor)` shares the memory of the tensor, which a tensor at rest does not have. So the new
parameter is a copy, and remembers in `taken_from` whose values it has. Both in one model would be tied in
plain PyTorch, which is refused. `nn.Parameter.__new__` calls `detach`, expects a tensor of the same
class, and sets `_is_param`; at that moment the copy becomes a plain parameter.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from headwater.core.errors import StreamError
from headwater.core.lazy import LazyTensor
from headwater.stream.home import Home

logger = logging.getLogger(__name__)

_VALUE_ATTRIBUTES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_METADATA = frozenset({
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel, torch.Tensor.nelement,
    torch.Tensor.element_size, torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.get_device,
    torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.is_signed,
    torch.Tensor.is_contiguous, torch.Tensor.is_shared, torch.Tensor.is_pinned,
    torch.Tensor.__len__, torch.Tensor.__hash__, torch.Tensor.requires_grad_, torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.is_floating_point, torch.is_complex, torch.numel,
})  # fmt: skip

DATA: Any = torch.Tensor.data
"""The attribute `data`; its getter and setter are functions that `__torch_function__` sees."""

LAYOUT = frozenset({torch.Tensor.stride, torch.Tensor.is_contiguous})
"""What the one element of memory of a tensor at rest cannot answer."""

View = Callable[[torch.Tensor], torch.Tensor]
T = TypeVar("T", bound=torch.Tensor)


class AtRest:
    """A tensor whose values are in the weight store, or a part of one.

    Attributes:
        home: where they are.
        owner: the parameter that counts changes in place, as autograd wants to know them.
    """

    __slots__ = ()

    home: Home
    owner: torch.Tensor | None

    def view_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of all values; each subclass has its own."""
        raise NotImplementedError  # not an abstractmethod: ABCMeta and the metaclass of torch.Tensor clash

    @property
    def _is_param(self) -> bool:
        """True for a parameter of another class than `nn.Parameter`."""
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self.__class__ = nn.Parameter  # type: ignore[assignment]

    def as_subclass(self, cls: type[T]) -> T:
        """Return the values as a plain tensor; torch does not ask `__torch_function__` for this.

        Raises:
            StreamError: if another class is wanted: what is written to such a tensor would be lost.
        """
        if cls is not torch.Tensor:
            raise StreamError(
                f"a {cls.__name__} would share the memory of a streamed tensor, which has none",
                where=self.home.spec.name,
                remedy="use a copy: tensor.clone().as_subclass(...)",
            )
        found: T = on_values(torch.Tensor.as_subclass, (self, cls), {})
        return found


class PartAtRest(AtRest, torch.Tensor):
    """What is a view of a parameter in plain PyTorch.

    Attributes:
        param: the parameter.
        meta: a tensor of the same shape and strides on the meta device.
        selection: returns this view of the whole parameter.
    """

    param: Any
    meta: torch.Tensor
    selection: View

    @property
    def home(self) -> Home:  # type: ignore[override]
        """The home that the parameter has now: another one after the model was planned again."""
        found: Home = self.param.home
        return found

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to take other memory, unless the parameter has become a plain one."""
        view = _plain_view(self)
        if view is self:
            raise moved(self.home, "set_")
        return view.set_(*args, **kwargs)

    def view_of(self, whole: torch.Tensor) -> torch.Tensor:
        return self.selection(whole)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in LAYOUT:
                return func(args[0].meta, *args[1:], **(kwargs or {}))
            if is_metadata(func):
                return func(*args, **(kwargs or {}))
            if func is torch.Tensor.detach and becomes_parameter(sys._getframe(1)):
                return new_parameter(args[0], args[0].param)
            source = home_of(args[1]) if func == DATA.__set__ else None
            if source is not None:
                raise tied_by_data("parameter", source.spec.name)
            return on_values(func, args, kwargs or {})


class Values:
    """Reads the values of a parameter in pieces, wherever they are when it is called.

    Two of them are equal if they read the same parameter.

    Args:
        param: a parameter that is at rest now, and may be bound, in another store, or a plain one later.
    """

    def __init__(self, param: torch.Tensor) -> None:
        self.param: Any = param

    def __call__(self) -> Iterator[torch.Tensor]:
        if hasattr(self.param, "home"):
            yield from self.param.home.pieces()
        else:
            yield self.param.data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Values) and other.param is self.param

    def __hash__(self) -> int:
        return id(self.param)


def values_of(value: object) -> torch.Tensor | None:
    """Return the parameter whose values a lazy tensor reads; None for another tensor."""
    read = value.read_pieces if isinstance(value, LazyTensor) else None
    return read.param if isinstance(read, Values) else None


def home_of(value: object) -> Home | None:
    """Return the home of a tensor whose values are those of a parameter in a store, or of a part of one."""
    if isinstance(value, AtRest):
        return getattr(value, "home", None)
    return getattr(values_of(value), "home", None)


def tied_by_data(name: str, other: str) -> StreamError:
    """Return the error for two parameters that are to share memory."""
    return StreamError(
        "two parameters would share memory, and each streamed parameter has its own",
        where=f"{name}.data = {other}.data",
        remedy=f"make them one Parameter, model.{name} = model.{other}, or assign a copy, "
        f"model.{name}.data = model.{other}.data.clone()",
    )


def new_parameter(value: Any, source: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the class of `value` that becomes a plain parameter; see [Note: new parameters].

    Args:
        value: a parameter at rest, or a part of one.
        source: that parameter.
    """
    plain = _plain_view(value)
    new: Any = torch.Tensor._make_subclass(type(value), read_copy(value) if plain is value else plain)
    new.taken_from = source
    return cast(torch.Tensor, new)


def read_copy(value: Any) -> torch.Tensor:
    """Return a copy of what a tensor at rest, or a lazy one, has in the store."""
    if isinstance(value, LazyTensor):
        return value.materialize()
    copy: torch.Tensor = value.view_of(value.home.read())
    return copy


def becomes_parameter(caller: FrameType) -> bool:
    """True if a function of tensors is called by `nn.Parameter(tensor)`."""
    return caller.f_code is nn.Parameter.__new__.__code__


def changed_while_recording(home: Home) -> StreamError:
    """Return the error for a change that plain PyTorch refuses too."""
    return StreamError(
        "a parameter that requires a gradient is changed in place",
        where=home.spec.name,
        remedy="do it within torch.no_grad(), as in plain PyTorch",
    )


def moved(home: Home, name: str) -> StreamError:
    """Return the error for an operation that gives a tensor other memory."""
    return StreamError(
        f"{name} would give a streamed parameter other memory, which the weight store does not see",
        where=home.spec.name,
        remedy="assign the values, parameter.data = tensor, or copy them, parameter.copy_(tensor)",
    )


def is_metadata(func: Any) -> bool:
    """Whether a function of tensors needs no values."""
    if func in _METADATA:
        return True
    is_attribute = getattr(func, "__name__", "") in ("__get__", "__set__")
    return is_attribute and getattr(func.__self__, "__name__", "") not in _VALUE_ATTRIBUTES


def stand_in(kind: type[T], shape: Sequence[int], like: torch.Tensor) -> T:
    """A tensor of NaN, with one element of memory, that is known by its kind; dtype and device of `like`."""
    value = float("nan") if like.is_floating_point() else 0
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(tuple(shape)).as_subclass(kind)


class _Read(torch.autograd.Function):
    """The wire values of a parameter; their gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, home: Home) -> torch.Tensor:
        return home.read().to(home.spec.wire_dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def on_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` with values from the store; what it changes in place goes back there.

    Raises:
        StreamError: if it changes a parameter that requires a gradient while gradients are recorded.
    """
    return _Operation(func, args, kwargs).run()


def _plain_view(leaf: Any) -> Any:
    """Return a part of a parameter that has become a plain one as a view of it; anything else as it is."""
    if isinstance(leaf, PartAtRest) and not hasattr(leaf.param, "home"):
        return leaf.view_of(leaf.param.data)
    return leaf


class _Operation:
    """One operation on tensors of which some are at rest."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._func = func
        leaves, self._structure = tree_flatten((args, kwargs))
        self._leaves = [_plain_view(leaf) for leaf in leaves]
        self._at_rest = {id(leaf): leaf for leaf in self._leaves if isinstance(leaf, AtRest)}
        self._wholes: dict[Home, torch.Tensor] = {}

    def run(self) -> Any:
        values = {key: self._value(leaf) for key, leaf in self._at_rest.items()}
        versions = {key: value._version for key, value in values.items()}
        results, structure = tree_flatten(self._call(values))
        self._write_back({key for key, value in values.items() if value._version != versions[key]}, values)
        same = {id(value): self._at_rest[key] for key, value in values.items()}
        returned = (
            same[id(result)] if id(result) in same else self._part(index, result)
            for index, result in enumerate(results)
        )
        return tree_unflatten(returned, structure)

    def _call(self, values: dict[int, torch.Tensor]) -> Any:
        args, kwargs = tree_unflatten([values.get(id(leaf), leaf) for leaf in self._leaves], self._structure)
        return self._func(*args, **kwargs)

    def _value(self, leaf: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and leaf.requires_grad and self._func != DATA.__get__:
            _note_read(leaf.home.spec.name)
            value: torch.Tensor = _Read.apply(leaf, leaf.home)  # type: ignore[no-untyped-call]
            return value
        if leaf.home not in self._wholes:
            self._wholes[leaf.home] = leaf.home.read()
        view: torch.Tensor = leaf.view_of(self._wholes[leaf.home])
        return view

    def _write_back(self, changed: set[int], values: dict[int, torch.Tensor]) -> None:
        for key in changed:
            leaf = self._at_rest[key]
            if values[key].requires_grad:
                raise changed_while_recording(leaf.home)
            if leaf.owner is not None:
                torch.autograd.graph.increment_version(leaf.owner)
        for home in {self._at_rest[key].home for key in changed}:
            home.write(self._wholes[home])

    def _part(self, index: int, result: Any) -> Any:
        """What stands for a result that is a view of the only tensor at rest; any other as it is."""
        if type(result) is not torch.Tensor or result.requires_grad or len(self._wholes) != 1:
            return result
        ((home, whole),) = self._wholes.items()
        if result.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            return result
        part = stand_in(PartAtRest, result.shape, result)
        leaf = next(leaf for leaf in self._at_rest.values() if leaf.home == home)
        part.param = leaf.param if isinstance(leaf, PartAtRest) else leaf
        part.meta = torch.empty_strided(result.shape, result.stride(), device="meta")
        part.selection = lambda whole: self._result_of(whole, index)
        owners = {leaf.owner for leaf in self._at_rest.values()}
        part.owner = None if self._func == DATA.__get__ else owners.pop()
        return part

    def _result_of(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        values = {  # a parameter may have become a plain one
            key: leaf.view_of(whole) if isinstance(leaf, PartAtRest) else whole
            for key, leaf in self._at_rest.items()
        }
        result: torch.Tensor = tree_flatten(self._call(values))[0][index]
        return result


_noted: set[str] = set()


def _note_read(name: str) -> None:
    """Say once of each parameter that it is read where streaming does not expect it."""
    if name not in _noted:
        _noted.add(name)
        logger.info("%s is read outside of its module's forward: it is fetched for that each time", name)
