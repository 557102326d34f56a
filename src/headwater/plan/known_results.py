"""Results of operators on fake tensors, made from those of equal calls before: `call_known`.

[Note: known results]
torch computes the result of an operator on fake tensors in Python, which takes a tenth of a millisecond to
several milliseconds. A dry run calls the same operators in every layer, and a plan needs several dry runs.
The result of most operators depends only on the layouts of the tensors and on the values of the other
arguments. So this process remembers the layout of each result, and makes the result of an equal call from it.

torch has such a cache too, but a look into it takes four times longer, and it leaves out several operators. A
result is remembered only if a tensor that is made from its layout has the same attributes.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, final

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from headwater.core.operators import written_arguments

_MOST = 20_000
"""If this number of results is reached, all are forgotten."""

_PACKAGES = ("aten", "prims", "headwater")
"""Namespaces of operators whose results are remembered. A user's operator may decide by anything."""

_CONSTANTS = frozenset(
    (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
)
"""Classes of arguments that are compared by their values."""

_BY_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
"""Tags of operators whose results depend on values, or that change the layout of an argument."""

_BY_STORAGES = ("as_strided", "set_", "resize", "_resize", "lift")
"""Beginnings of the names of operators that depend on the size of a storage, or keep a real tensor."""


class _New(NamedTuple):
    """A tensor with its own storage."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class _View(NamedTuple):
    """A tensor in the storage of the argument with the index `of`."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    of: int
    offset: int


class _Argument(NamedTuple):
    """The argument with the index `of`."""

    of: int


_Made = _New | _View | _Argument | None

_Result = tuple[type | None, tuple[_Made, ...]]
"""The class of a sequence, or `None` for a single tensor, and how to make each tensor."""

_UNKNOWN: Any = object()

_CPU = torch.device("cpu")

_RESULTS: dict[Hashable, _Result | None] = {}
"""The arguments of a call -> its result; `None` if torch must compute it each time."""


def call_known(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return `func(*args, **kwargs)` on fake tensors, made from an equal result if one is known."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    # Inside vmap and similar transforms, a new tensor would belong to a level of the transform.
    if mode is None or not _is_known_by_layouts(func) or torch._C._functorch.peek_interpreter_stack():
        return func(*args, **kwargs)
    arguments = _Arguments(mode)
    if not arguments.add(args) or (kwargs and not arguments.add(kwargs.items())):
        return func(*args, **kwargs)
    key = (func, torch.get_default_dtype(), torch.is_inference_mode_enabled(), *arguments.key)
    known = _RESULTS.get(key, _UNKNOWN)
    if known is not None and known is not _UNKNOWN:
        return arguments.result(known)
    out = func(*args, **kwargs)
    if known is _UNKNOWN:
        if len(_RESULTS) >= _MOST:
            _RESULTS.clear()
        _RESULTS[key] = arguments.described(out)
    return out


@final
class _Arguments:
    """The arguments of a call.

    Attributes:
        key: what the result depends on.

    Args:
        mode: the active mode of fake tensors.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.key: list[Any] = []
        self._mode = mode
        self._tensors: list[FakeTensor] = []

    def add(self, values: Iterable[Any]) -> bool:
        """Add arguments; return False if the result depends on more than can be compared."""
        key = self.key
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self._mode or value.constant is not None:
                    return False
                if value.layout is not torch.strided:
                    return False
                self._tensors.append(value)
                key += _layout(value)
            elif kind in _CONSTANTS:
                key += (kind, value)  # with the class, because 1 equals 1.0 and True
            elif kind is tuple or kind is list:
                key += (kind, len(value))
                if not self.add(value):
                    return False
            else:
                return False
        return True

    def result(self, known: _Result) -> Any:
        """Return a result like the known one."""
        kind, made = known
        results = [None if each is None else self._make(each) for each in made]
        return results[0] if kind is None else kind(results)

    def described(self, out: Any) -> _Result | None:
        """Return how to make a result like `out`; `None` if that cannot be done."""
        kind = type(out) if type(out) in (tuple, list) else None
        results = (out,) if kind is None else out
        made: list[_Made] = []
        storages = set[int]()
        for result in results:
            if result is None:
                made.append(None)
                continue
            each = self._description(result)
            if each is None:
                return None
            if isinstance(each, _New):
                storage = result.untyped_storage()._cdata
                if storage in storages:  # `_make` would give two results in one storage a storage each
                    return None
                storages.add(storage)
            made.append(each)
        return kind, tuple(made)

    def _description(self, result: Any) -> _Made:
        """Return how to make one of the results; `None` if that cannot be done."""
        if type(result) is not FakeTensor or result.constant is not None or result.requires_grad:
            return None
        if result.layout is not torch.strided or result.fake_device != _CPU:
            return None
        # An in-place operator returns its first argument, even if other arguments are the same tensor.
        if self._tensors and result is self._tensors[0]:
            return _Argument(0)
        storage, layout = result.untyped_storage(), (result.shape, result.stride(), result.dtype)
        around = [
            index
            for index, tensor in enumerate(self._tensors)
            if tensor.untyped_storage()._cdata == storage._cdata
        ]
        if len(around) > 1 or any(result is tensor for tensor in self._tensors):
            return None
        made = _View(*layout, around[0], int(result.storage_offset())) if around else _New(*layout)
        again = self._make(made)
        is_same = _layout(again) == _layout(result) and again.untyped_storage().nbytes() == storage.nbytes()
        return made if is_same else None

    def _make(self, made: _New | _View | _Argument) -> FakeTensor:
        if isinstance(made, _Argument):
            return self._tensors[made.of]
        with torch._C._DisableTorchDispatch():
            if isinstance(made, _New):
                meta = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
            else:
                meta = torch.empty(0, dtype=made.dtype, device="meta")
                meta.set_(self._tensors[made.of].untyped_storage(), made.offset, made.shape, made.stride)
        return self._fake(meta)

    def _fake(self, meta: torch.Tensor) -> FakeTensor:
        """Return `FakeTensor(mode, meta, "cpu")`, whose constructor takes four times longer."""
        fake: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=_CPU
        )
        if self._mode._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        else:
            torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(_attributes(), fake_mode=self._mode)
        return fake


@functools.cache
def _attributes() -> dict[str, Any]:
    """Return the attributes of each new fake tensor, except for its mode."""
    mode = FakeTensorMode()
    with torch._C._DisableTorchDispatch():
        fake = FakeTensor(mode, torch.empty(0, device="meta"), _CPU)
    return {name: value for name, value in vars(fake).items() if value is not mode}


def _layout(tensor: FakeTensor) -> tuple[Hashable, ...]:
    """Return the attributes of a tensor on which results depend."""
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.fake_device,
        torch._C._dispatch_keys(tensor).raw_repr(),  # differs for conjugated and negative views and others
    )


@functools.cache
def _is_known_by_layouts(func: Any) -> bool:
    """True if the result of an operator depends only on layouts of tensors and values of other arguments."""
    if not isinstance(func, OpOverload) or func.namespace not in _PACKAGES:
        return False
    if any(tag in func.tags for tag in _BY_VALUES) or func._opname.startswith(_BY_STORAGES):
        return False
    arguments = func._schema.arguments
    written = written_arguments(func)
    # If an operator changes another argument than the first, it is unknown which argument it returns.
    return not written or (written == (arguments[0].name,) and str(arguments[0].type) == "Tensor")
