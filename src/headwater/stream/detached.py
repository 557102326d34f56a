"""Tensors that read all values of a parameter from the weight store, such as the result of `detach`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import torch

from headwater.core.errors import StreamError
from headwater.core.lazy import LazyTensor, StoredTensor
from headwater.core.uncompiled import uncompiled
from headwater.stream.at_rest import (
    AtRest,
    PartAtRest,
    all_of,
    moved,
    on_values,
    plain_view,
    tensor_in_memory,
)
from headwater.stream.home import Home
from headwater.stream.parameter_memory import KeptHome, Memory
from headwater.stream.placeholders import DATA, LAYOUT, is_metadata


@final
class Values:
    """A function that yields the values of a parameter in pieces, from the place where they are at the call.

    Two of these objects are equal if they read the same parameter.

    Args:
        param: a parameter at rest. Later the parameter may be bound, in another store, or a plain one.
    """

    def __init__(self, param: torch.Tensor) -> None:
        self.memory = Memory.of(param)

    def __call__(self) -> Iterator[torch.Tensor]:
        home = self.memory.home
        if isinstance(home, KeptHome):
            yield home.read()
        else:
            yield from home.pieces()

    def in_memory(self) -> torch.Tensor | None:
        """Return a plain tensor with the values, which is only read; see `LazyTensor`."""
        return tensor_in_memory(self.memory)

    @property
    def place(self) -> tuple[Any, None] | None:
        """(place of the parameter in a store, `None`): the key for all its values; see `StoredValues`."""
        home = self.memory.home
        return None if isinstance(home, KeptHome) else (home, None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Values) and other.memory is self.memory

    def __hash__(self) -> int:
        return id(self.memory)


class DetachedAtRest(AtRest, StoredTensor):
    """The result of `detach` of a parameter at rest. Writes to it, or to its views, reach the store.

    Attributes:
        source: the memory of the parameter.
        again_of: the detached tensor that `detach` was called on; `None` if it was called on the parameter.
    """

    again_of: DetachedAtRest | None = None
    selection = staticmethod(all_of)

    @classmethod
    def of(cls, param: Any) -> DetachedAtRest:
        """Return the detached tensor of a parameter at rest."""
        found = cls(Values(param), param.home.spec.shape, param.home.spec.dtype, param.home.device)
        found.source, found.owner = found.read_pieces.memory, param  # type: ignore[attr-defined]
        return found

    def __getattr__(self, name: str) -> Any:
        if name == "source":  # torch has made this object from another one, and copied no attributes
            raise StreamError(
                "torch has made a tensor without values from one whose values are in the weight store, as "
                "torch.FloatTensor(tensor) does",
                remedy="pass a copy to torch's constructor: tensor.clone()",
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def home(self) -> Home:  # type: ignore[override]
        found: Home = self.source.home
        return found

    @property
    def meta(self) -> torch.Tensor:
        home: Any = self.home
        values: torch.Tensor = home.read() if isinstance(home, KeptHome) else home.meta
        return values

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        self._become_lazy()
        self._is_param = value

    def _become_lazy(self) -> None:
        """Change the class to `LazyTensor`, which is read-only, because the tensor will require a gradient.

        The tensor on which `detach` was called changes too: `nn.Parameter(tensor)` expects one class.
        """
        made_of = self.again_of
        self.__class__ = LazyTensor  # type: ignore[assignment]
        if isinstance(made_of, DetachedAtRest):
            made_of._become_lazy()

    @classmethod
    @uncompiled
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            own = args[0] if args and isinstance(args[0], DetachedAtRest) else None
            if own is not None and func in LAYOUT:
                return func(own.meta, *args[1:], **kwargs)
            if own is not None and is_metadata(func):
                result = func(*args, **kwargs)
                if own.requires_grad:
                    own._become_lazy()
                return result
            if own is not None and func is torch.Tensor.detach:
                return own._again()
            if own is not None and func == DATA.__set__ and plain_view(own) is own:
                raise moved(own.home, "tensor.data = …")
            return on_values(func, args, kwargs)

    def _again(self) -> DetachedAtRest:
        found = type(self)(self.read_pieces, self.shape, self.dtype, self.device)
        found.source, found.owner, found.again_of = self.source, self.owner, self
        return found

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `StreamError`: a tensor at rest cannot get other memory."""
        raise moved(self.home, "set_")


def values_of(value: object) -> torch.Tensor | None:
    """Return the parameter whose values a stored tensor reads. Return `None` for any other object."""
    read = value.read_pieces if isinstance(value, StoredTensor) else None
    return read.memory.param if isinstance(read, Values) and read.memory.kept is None else None


def home_of(value: object) -> Home | None:
    """Return the place in the store of a parameter at rest, or of its view. `None` for other objects."""
    if isinstance(value, AtRest):
        home = getattr(value, "home", None)
        return home if isinstance(home, Home) else None
    return getattr(values_of(value), "home", None)


def whole_memory(value: object, param: Any) -> Memory | None:
    """Return the memory of a view that has all elements of `param` in the same layout, otherwise `None`.

    It may be the present memory of the parameter or a former one.
    """
    if not isinstance(value, PartAtRest | DetachedAtRest) or not isinstance(value.source, Memory):
        return None
    layout, own = value.meta, param.home.meta
    same = layout.shape == own.shape and layout.stride() == own.stride()
    same = same and value.dtype == param.home.spec.dtype and value.source.param is param
    return value.source if same else None
