"""Operations on tensors whose values are in the weight store, and the views that such operations return.

[Note: parameters at rest]
Inside the forward of its module a parameter is a plain `nn.Parameter` over a slab. Between forwards the same
object is at rest: it has the class `ParameterAtRest`, which intercepts every torch operation on it. Shapes
and dtypes are known without the store. Values are read from the store, and values that an operation changes
are written back. Gradients are added to the sums in the store. A view of a parameter in plain PyTorch
(`param.data`, `param[0]`, …) is a `PartAtRest`, which works the same way. So a model or a loop can read and
write weights anywhere: it never reads memory without values, and no write is lost.
"""

from __future__ import annotations

import abc
import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from headwater.core.errors import StreamError
from headwater.core.interrupts import uninterrupted
from headwater.core.read_only_storage import Storage, read_only
from headwater.core.uncompiled import uncompiled
from headwater.plan.alive import has_storage
from headwater.stream.addresses import reserved_storage, reserved_tensor
from headwater.stream.autocast_blocks import note_read_of_master
from headwater.stream.declared_writes import declared_writes
from headwater.stream.home import Home
from headwater.stream.new_parameters import becomes_parameter, becomes_parameter_when_marked, new_parameter
from headwater.stream.parameter_memory import KeptHome
from headwater.stream.placeholders import BY_IDENTITY, DATA, LAYOUT, NotTraced, is_metadata, stand_in
from headwater.stream.recorded import RecordedRead
from headwater.stream.transforms import refuse_recorded_read

logger = logging.getLogger(__name__)

View = Callable[[torch.Tensor], torch.Tensor]
T = TypeVar("T", bound=torch.Tensor)


class AtRest:
    """A tensor whose values are in the weight store, or a view of such a tensor.

    Attributes:
        home: the place of the values.
        owner: the parameter whose version counter counts changes in place, for autograd.
        source: the object from which `home` is read each time, because a new plan changes the place.
        selection: takes all values of the parameter and returns the view of them that this tensor is.
    """

    __slots__ = ()

    home: Home
    owner: torch.Tensor | None
    source: Any
    selection: View

    def __iter__(self) -> Iterator[torch.Tensor]:
        tensor: Any = self
        return iter(tensor.unbind(0))

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `StreamError`: values that another library writes to this memory would be lost."""
        raise StreamError(
            "another library would share the memory of a tensor whose values are in the weight store",
            where=self.home.spec.name,
            remedy="pass a copy to it: tensor.clone()",
        )

    def share_memory_(self) -> torch.Tensor:
        """Share the memory of a tensor whose values have left the store, as torch does.

        Raises:
            StreamError: if the values are in the store: other processes would not see later changes.
        """
        view = plain_view(self)
        if view is self:
            raise _not_shared(self.home)
        found: torch.Tensor = view.share_memory_()
        return found

    def as_subclass(self, cls: type[T]) -> T:
        """Return the values as a plain tensor. torch does not call `__torch_function__` for this method.

        Raises:
            StreamError: if `cls` is another class: values that are written to such a tensor would be lost.
        """
        if cls is not torch.Tensor:
            raise StreamError(
                f"a {cls.__name__} would share the memory of a tensor whose values are in the weight store",
                where=self.home.spec.name,
                remedy="use a copy: tensor.clone().as_subclass(...)",
            )
        found: T = on_values(torch.Tensor.as_subclass, (self, cls), {})
        return found


def pickled_as_plain(tensor: Any, protocol: Any) -> Any:
    """Pickle a tensor at rest as a plain tensor in host memory; see `object.__reduce_ex__`.

    Views of one parameter share its memory, so `torch.save` writes that memory only once.
    """
    whole = tensor_in_memory(tensor.source)
    view = tensor.selection(tensor.home.read().cpu() if whole is None else whole)
    return view.detach().requires_grad_(tensor.requires_grad).__reduce_ex__(protocol)


def all_of(whole: torch.Tensor) -> torch.Tensor:
    """Return `whole`. This is the `selection` of a tensor at rest that has every value of its parameter."""
    return whole


class PartAtRest(AtRest, NotTraced):
    """A tensor at rest that would be a view of a parameter in plain PyTorch.

    Attributes:
        meta: a tensor of the same shape, strides and storage offset on the meta device.
    """

    meta: torch.Tensor
    _is_param = becomes_parameter_when_marked

    __reduce_ex__ = pickled_as_plain

    @property
    def home(self) -> Home:  # type: ignore[override]
        found: Home = self.source.home
        return found

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `StreamError` if the values are in the store. Otherwise set the memory, as torch does."""
        view = plain_view(self)
        if view is self:
            raise moved(self.home, "set_")
        return view.set_(*args, **kwargs)

    @classmethod
    @uncompiled
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in LAYOUT:
                return func(args[0].meta, *args[1:], **(kwargs or {}))
            # These operations are frequent, and need no read of the store.
            if is_metadata(func):
                return func(*args, **(kwargs or {}))
            if func is torch.Tensor.detach and becomes_parameter():
                return new_parameter(args[0], args[0].source.param)
            if func == DATA.__set__ and plain_view(args[0]) is args[0]:
                raise moved(args[0].home, "tensor.data.data = …")
            return on_values(func, args, kwargs or {})


class RecordedPart(NotTraced):
    """A view of a weight that autograd records; see [Note: recorded views].

    Attributes:
        read: the copy of the weight that it is a view of.
    """

    read: RecordedRead

    @classmethod
    @uncompiled
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if is_metadata(func) or func in BY_IDENTITY:
                return func(*args, **(kwargs or {}))
            if func is torch.Tensor.__format__:  # formats the number of a plain tensor only
                return format(args[0].plain(), *args[1:])
            return on_values(func, args, kwargs or {})

    def plain(self) -> torch.Tensor:
        """Return the present values as a plain tensor of the same graph."""
        self.read.refresh()
        return self.as_subclass(torch.Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)


LIKE_ANOTHER = frozenset({torch.Tensor.view_as, torch.Tensor.expand_as})
"""Functions that return a view in the shape of another tensor."""


def view_like_itself(func: Callable[..., Any], param: Any) -> torch.Tensor:
    """Return the view `func(param, param)`, whose node in the graph leads directly to the parameter's.

    `param.view_as(param).grad_fn.next_functions[0][0]` is the usual way to the node that accumulates the
    gradient of a parameter. `_Read` would be between the two nodes.
    """
    view: torch.Tensor = func(param, param)
    if not _is_recorded(param) or type(view) is not torch.Tensor:  # another class: a tensor of a dry run
        found: torch.Tensor = on_values(func, (param, param), {})
        return found
    _note_read(param.home.spec.name)
    note_read_of_master(param)
    DATA.__set__(view, param.home.read())
    view.__class__ = RecordedPart
    view.read = RecordedRead(param, view)  # type: ignore[attr-defined]
    return view


def refresh_views(tree: object) -> None:
    """Copy present values to the recorded views in a tree. A checkpoint saves them before any operation."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, RecordedPart):
            leaf.read.refresh()


def changed_while_recording(home: Home) -> StreamError:
    """Return the error for a parameter that is changed in place outside of `torch.no_grad()`."""
    return StreamError(
        "a parameter that requires a gradient is changed in place",
        where=home.spec.name,
        remedy="change it inside torch.no_grad(), as in plain PyTorch",
    )


def moved(home: Home, name: str) -> StreamError:
    """Return the error for an operation `name` after which a streamed parameter would have other memory."""
    return StreamError(
        f"{name} would give a streamed parameter other memory, so the weight store would miss later changes",
        where=home.spec.name,
        remedy="assign the values, parameter.data = tensor, or copy them, parameter.copy_(tensor)",
    )


def _not_shared(home: Home) -> StreamError:
    return StreamError(
        "other processes would share a copy of a streamed parameter, and would not see later changes of it",
        where=home.spec.name,
        remedy="share a copy, parameter.detach().clone().share_memory_(), or first call "
        "headwater.release(model)",
    )


class _Read(torch.autograd.Function):
    """A read from the store that autograd records, so that a gradient reaches the tensor at rest."""

    @staticmethod
    def forward(ctx: Any, leaf: Any) -> torch.Tensor:
        values: torch.Tensor = leaf.selection(leaf.home.read())
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


_STORAGES = (torch.Tensor.untyped_storage, torch.Tensor.storage, torch.Tensor._typed_storage)


def on_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on values from the store. Write values that `func` changes in place back to the store.

    Raises:
        StreamError: if `func` changes a parameter that requires a gradient outside of `torch.no_grad()`.
    """
    if func is torch.Tensor.data_ptr:
        return _address(args[0])
    if func is torch.Tensor.contiguous and _layout(args[0]).is_contiguous(*args[1:], **kwargs):
        return args[0]
    if func in _STORAGES:
        storage = _storage(plain_view(args[0]))
        if storage is not None:
            untyped = read_only(storage)
            if func is torch.Tensor.untyped_storage:
                return untyped
            return read_only(torch.TypedStorage(wrap_storage=untyped, dtype=args[0].dtype, _internal=True))
    if getattr(func, "__module__", None) == "torch.nn.init":  # these disable gradients only after the read
        with torch.no_grad():
            return _Operation(func, args, kwargs).run()
    return _Operation(func, args, kwargs).run()


def _address(tensor: Any) -> int:
    """Return the address of a tensor at rest or of a recorded view; see [Note: addresses]."""
    tensor = plain_view(tensor)
    if not tensor.numel():
        return 0  # as in torch
    storage = _storage(tensor)
    if storage is None:
        return int(tensor.data_ptr())
    layout = _layout(tensor)
    return storage.data_ptr() + int(layout.storage_offset()) * layout.element_size()


def _layout(tensor: Any) -> torch.Tensor:
    """Return a tensor with the shape, strides, offset and dtype that `tensor` shows."""
    if isinstance(tensor, RecordedPart):
        return tensor
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    found: torch.Tensor = tensor.home.meta if is_parameter else tensor.meta
    return found


def _storage(tensor: Any) -> torch.UntypedStorage | None:
    """Return the memory that is reserved for the parameter of a tensor at rest, with its present values.

    Return `None` for other tensors, for a parameter without elements, and for a recorded view from before a
    change of the parameter's dtype.
    """
    if isinstance(tensor, RecordedPart):
        source, home, dtype = tensor.read.memory, tensor.read.home, tensor.read.dtype
    elif isinstance(tensor, AtRest):
        source, home, dtype = tensor.source, tensor.home, None
    else:
        return None
    if isinstance(home, KeptHome) or not home.meta.numel() or dtype not in (None, home.meta.dtype):
        return None
    param, state = source.tensor_name
    return reserved_storage(param, state, home)


def tensor_in_memory(source: Any) -> torch.Tensor | None:
    """Return a plain tensor over host memory with the present values of a tensor at rest. Only read it.

    Args:
        source: the `source` of a tensor at rest.

    Returns:
        The tensor; `None` if it has no elements.
    """
    home = source.home
    if isinstance(home, KeptHome):
        kept: torch.Tensor = home.read().detach().cpu()
        return kept
    param, state = source.tensor_name
    return reserved_tensor(param, state, home)


def plain_view(leaf: Any) -> Any:
    """Return a plain view if the values of a tensor at rest have left the store, otherwise `leaf` itself.

    If it is a recorded view, its values are those of the weight afterwards.
    """
    if isinstance(leaf, RecordedPart):
        leaf.read.refresh()
        return leaf
    home: Any = getattr(leaf, "home", None) if isinstance(leaf, AtRest) else None
    return leaf.selection(home.read()) if isinstance(home, KeptHome) else leaf


def plain_value(value: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor if the values of a tensor at rest have left the store, else `value` itself.

    A recorded view becomes a plain tensor too.
    """
    found: torch.Tensor = value.plain() if isinstance(value, RecordedPart) else plain_view(value)
    return found


class WithoutValues(NotTraced):
    """A tensor without values: an operation that would read them raises an error."""

    @abc.abstractmethod
    def refusal(self) -> StreamError:
        """Return the error for an operation that would read the values."""


def refuse_without_values(leaves: Iterable[object]) -> None:
    """Raise an error if one of the arguments of an operation has no values."""
    for leaf in leaves:
        if isinstance(leaf, WithoutValues):
            raise leaf.refusal()


class _Operation:
    """One operation that has tensors at rest among its arguments."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._func = func
        leaves, self._structure = tree_flatten((args, kwargs))
        refuse_without_values(leaves)
        self._leaves = [plain_view(leaf) for leaf in leaves]
        self._at_rest = {id(leaf): leaf for leaf in self._leaves if isinstance(leaf, AtRest)}
        self._views = [leaf for leaf in self._leaves if isinstance(leaf, RecordedPart)]
        self._reads = [view.read for view in self._views]
        self._wholes: dict[Home, torch.Tensor] = {}

    def run(self) -> Any:
        values = {key: self._value(leaf) for key, leaf in self._at_rest.items()}
        versions = {key: value._version for key, value in values.items()}
        versions_of_views = [view._version for view in self._views]
        result = self._call(values)
        results, structure = tree_flatten(result)
        declared = declared_writes(self._func, partial(tree_unflatten, self._leaves, self._structure))
        changed = {key for key, value in values.items() if key in declared or value._version != versions[key]}
        pairs = zip(self._views, versions_of_views, strict=True)
        views = [view for view, version in pairs if id(view) in declared or view._version != version]
        self._write_back(changed, values)
        _write_views(views)
        # An in-place operation with a tensor that requires a gradient makes the value part of a graph. Such a
        # value is returned itself, because the tensor at rest is not part of the graph.
        unchanged = (
            (key, value) for key, value in values.items() if key not in changed or not _is_recorded(value)
        )
        same = {id(value): self._at_rest[key] for key, value in unchanged}
        returned = (
            same[id(result)] if id(result) in same else self._part(index, result)
            for index, result in enumerate(results)
        )
        if isinstance(result, Storage) and (self._at_rest or self._views):
            return read_only(result)
        return tree_unflatten(returned, structure)

    def _call(self, values: dict[int, torch.Tensor]) -> Any:
        args, kwargs = tree_unflatten([values.get(id(leaf), leaf) for leaf in self._leaves], self._structure)
        return self._func(*args, **kwargs)

    def _value(self, leaf: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and leaf.requires_grad and self._func != DATA.__get__:
            _note_read(leaf.home.spec.name)
            refuse_recorded_read(leaf.home.spec.name)
            note_read_of_master(leaf.source.param)
            # `home.read()` would not do, because the graph must lead to the parameter.
            value: torch.Tensor = _Read.apply(leaf)  # type: ignore[no-untyped-call]
            if type(value) is torch.Tensor and has_storage(value):
                self._reads.append(RecordedRead(leaf, value))
            return value
        if leaf.home not in self._wholes:
            self._wholes[leaf.home] = leaf.home.read()
        view: torch.Tensor = leaf.selection(self._wholes[leaf.home])
        if leaf.requires_grad and not torch.is_grad_enabled():
            # Nothing is recorded here, but torch selects the kernel of a matrix product by this flag.
            return view.detach().requires_grad_()
        return view

    @uninterrupted
    def _write_back(self, changed: set[int], values: dict[int, torch.Tensor]) -> None:
        for key in changed:
            leaf = self._at_rest[key]
            if _is_recorded(values[key]) and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                raise changed_while_recording(leaf.home)
            if leaf.owner is not None:
                # This makes autograd raise in a backward that has saved the old values.
                torch.autograd.graph.increment_version(leaf.owner)
        # Each home is written once: two views of one parameter are changed in the same memory.
        for home in {self._at_rest[key].home for key in changed}:
            home.write(self._wholes[home])

    def _part(self, index: int, result: Any) -> Any:
        """Return a view of the parameter as a `PartAtRest` or `RecordedPart`, and any other result itself."""
        if isinstance(result, numpy.ndarray) and (self._at_rest or self._views):
            result.flags.writeable = False  # a write to a copy would be lost
        if self._reads and type(result) is torch.Tensor and has_storage(result):
            read = next((read for read in self._reads if read.is_of(result)), None)
            if read is not None:
                part: Any = result
                part.__class__ = RecordedPart
                part.read = read
                return part
        if type(result) is not torch.Tensor or _is_recorded(result) or len(self._wholes) != 1:
            return result
        if not has_storage(result):
            return result
        ((home, whole),) = self._wholes.items()
        if result.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            return result
        part = stand_in(PartAtRest, result.shape, result)
        leaf = next(leaf for leaf in self._at_rest.values() if leaf.home == home)
        part.source = leaf.source
        numel = result.untyped_storage().nbytes() // result.element_size()
        part.meta = torch.empty(numel, dtype=result.dtype, device="meta").as_strided(
            result.shape, result.stride(), result.storage_offset()
        )
        part.selection = lambda whole: self._result_of(whole, index)
        owners = {leaf.owner for leaf in self._at_rest.values()}
        part.owner = None if self._func == DATA.__get__ else owners.pop()
        return part.requires_grad_(result.requires_grad)

    def _result_of(self, whole: torch.Tensor, index: int) -> torch.Tensor:
        values = {  # a parameter may have become a plain one
            key: leaf.selection(whole) if isinstance(leaf, AtRest) else whole
            for key, leaf in self._at_rest.items()
        }
        result: torch.Tensor = tree_flatten(self._call(values))[0][index]
        return result


def _write_views(changed: Sequence[RecordedPart]) -> None:
    """Write back recorded views that an operation has changed.

    Raises:
        StreamError: if a view requires a gradient and the operation was outside of `torch.no_grad()`.
    """
    for view in changed:
        if _is_recorded(view):
            view.read.forget()
            raise changed_while_recording(view.read.home)
    for read in dict.fromkeys(view.read for view in changed):
        read.write()


def _is_recorded(tensor: torch.Tensor) -> bool:
    """True if operations on a tensor are recorded for backward now."""
    return tensor.requires_grad and torch.is_grad_enabled()


_noted: set[str] = set()


def _note_read(name: str) -> None:
    """Log, once for each parameter, that it is read outside of its module's forward."""
    if name not in _noted:
        _noted.add(name)
        logger.info("%s is read outside of its module's forward: each such read fetches it", name)
