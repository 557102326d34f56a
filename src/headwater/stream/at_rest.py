"""Operations on tensors whose values are in the weight store: read before, written back after.

[Note: parameters at rest]
Inside the forward of its module a parameter is a plain `nn.Parameter` over a slab. Between forwards the same
object has the class `ParameterAtRest`, which sees every torch operation on it: shapes and dtypes are answered
at once, values are read from the store, what an operation writes goes back to the store, and gradients go to
where the others are. What is a view of a parameter in plain PyTorch (`param.data`, `param[0]`, …) is a
`PartAtRest`, for which the same holds. So nothing can read a weight that is not there, wherever a model or a
loop does it, and nothing that is written is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
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
            if func == DATA.__set__ and isinstance(args[1], AtRest):
                raise tied_by_data("parameter", args[1].home.spec.name)
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


def home_of(value: object) -> Home | None:
    """Return the home of a tensor whose values are those of a parameter in a store, or of a part of one."""
    if isinstance(value, AtRest):
        return value.home
    read = value.read_pieces if isinstance(value, LazyTensor) else None
    return getattr(read.param, "home", None) if isinstance(read, Values) else None


def tied_by_data(name: str, other: str) -> StreamError:
    """Return the error for two parameters that are to share memory."""
    return StreamError(
        "two parameters would share memory, and each streamed parameter has its own",
        where=f"{name}.data = {other}.data",
        remedy=f"make them one Parameter, model.{name} = model.{other}, or assign a copy, "
        f"model.{name}.data = model.{other}.data.clone()",
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


class _Operation:
    """One operation on tensors of which some are at rest."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._func = func
        self._leaves, self._structure = tree_flatten((args, kwargs))
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
                raise StreamError(
                    "a parameter that requires a gradient is changed in place",
                    where=leaf.home.spec.name,
                    remedy="do it within torch.no_grad(), as in plain PyTorch",
                )
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
        values = {key: leaf.view_of(whole) for key, leaf in self._at_rest.items()}
        result: torch.Tensor = tree_flatten(self._call(values))[0][index]
        return result


_noted: set[str] = set()


def _note_read(name: str) -> None:
    """Say once of each parameter that it is read where streaming does not expect it."""
    if name not in _noted:
        _noted.add(name)
        logger.info("%s is read outside of its module's forward: it is fetched for that each time", name)
