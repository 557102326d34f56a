"""Operators that fake tensors cannot run, and the results that a dry run uses instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.distributions import Distribution
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from headwater.core.errors import StreamError
from headwater.core.trees import operands
from headwater.plan.known_results import call_known
from headwater.plan.writes import changed_by

_GROUPED_MM = torch.ops.aten._grouped_mm.default

_ORDERS = frozenset({torch.ops.aten.randperm.default, torch.ops.aten.randperm.generator})
"""Operators that draw an order. A forward may read modules in this order, and must then read each once."""

_KNOWN_BYTES = 1 << 20
"""A dry run computes the values of tensors of at most this size."""

_MOST_DECISIONS = 1000
"""The most numbers and truth values that may be made up within one call of a module."""

_OVERLAPS = 1
"""The number that torch returns if elements of a tensor share memory. Such a tensor cannot be written to."""


def call_operator(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    value: Callable[[torch.Tensor], torch.Tensor | None] = lambda fake: None,
) -> Any:
    """Return `func(*args, **kwargs)` on fake tensors. Results that depend on missing values are made up.

    A number read from a tensor is 1, and a truth value is `False` (most of them guard against bad data, or
    skip something). If a shape depends on data, the largest shape is used: every element is selected.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
        value: returns the values of a fake tensor, if they are known.
    """
    if func is _GROUPED_MM and args[0].dtype == torch.float32:
        return _grouped_mm(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs"))
    try:
        return call_known(func, args, kwargs)
    except DataDependentOutputException:
        dtype = args[0].dtype
        return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
    except DynamicOutputShapeException:
        with no_dispatch():
            out = func(*tree_map_only(torch.Tensor, lambda t: _or_ones(value(t), t), args), **kwargs)
        # The results are made outside of `no_dispatch`, so that they are fake.
        return tree_map_only(torch.Tensor, torch.empty_like, out)


class Operators:
    """Runs the operators of a dry run. Results that depend on known values alone have real values.

    The known values are the integers, truth values and single numbers of the batch and of buffers (token ids,
    masks, image sizes, flags), and all that a forward computes from them and from numbers in its code. So
    sizes and branches that depend on known values are those of a real step. Only decisions by weights or
    other floating-point data need a stand-in.
    """

    def __init__(self) -> None:
        self._known = _KnownValues()
        self._decisions = 0  # those of the innermost call of a module that runs
        self._decided_last = False

    @contextmanager
    def module_call(self) -> Iterator[None]:
        """Enter a context in which a module is called.

        Raises:
            StreamError: see `call`.
        """
        outer, self._decisions = self._decisions, 0
        try:
            yield
        finally:
            inner, self._decisions = self._decisions, outer
        # The call may return a truth value that a loop around it needs.
        self._count_decisions(inner > 0)

    def know(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        """Keep the value of a fake tensor of integers or truth values, or of a single number."""
        is_known = value.numel() == 1 or not value.is_floating_point()
        if is_known and not isinstance(value, FakeTensor):
            self._known.add(fake, value)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `func(*args, **kwargs)` on fake tensors.

        Raises:
            StreamError: if a module reads more made-up numbers than the limit, probably in an endless loop.
        """
        written = changed_by(func, args, kwargs)
        values = self._values(operands((*args, *kwargs.values()))) if _computable(func, written) else None
        if values is None:
            for tensor in written:
                self._known.remove(tensor)
            # The numbers of one list (`tolist`) count as one.
            decides = torch.Tag.data_dependent_output in func.tags
            self._count_decisions(decides and not self._decided_last)
            self._decided_last = decides
            return call_operator(func, args, kwargs, self._known.value)

        def real() -> Any:
            with no_dispatch():
                real_args, real_kwargs = tree_map_only(torch.Tensor, lambda t: values[id(t)], (args, kwargs))
                return func(*real_args, **real_kwargs)

        # An operator that writes must run, or the known values of what it changes would be out of date.
        return self._faked(func, args, kwargs, real, may_skip=not written)

    def _count_decisions(self, number: int) -> None:
        """Count numbers that must be made up."""
        self._decisions += number
        if self._decisions > _MOST_DECISIONS:
            raise StreamError(
                f"the dry run of a forward has read more than {_MOST_DECISIONS:,} numbers that depend on "
                "weights or activations, which have no values in a dry run. Probably this is a loop that "
                "such a number should end",
                remedy="limit the number of iterations, or use weights and a batch that have values",
            )

    def _values(self, tensors: list[torch.Tensor]) -> dict[int, torch.Tensor] | None:
        """Return id of fake tensor -> its real values; `None` if the values of one of them are unknown."""
        values: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            value = self._known.value(tensor)
            if value is None:
                return None
            values[id(tensor)] = value
        return values

    def _faked(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        real: Callable[[], Any],
        *,
        may_skip: bool,
    ) -> Any:
        """Return the operator's result on fake tensors, and keep what `real` computes as their values.

        A result that is too large to be kept is not computed: a mask of a long text can take a gigabyte.
        """
        try:
            out = call_known(func, args, kwargs)
        except DataDependentOutputException:
            return real()  # a number
        except DynamicOutputShapeException:
            values = real()
            out = tree_map_only(torch.Tensor, torch.empty_like, values)
        else:
            made = operands((out,))
            if may_skip and made and not any(map(_is_small, made)):
                return out
            values = real()
        for fake, value in zip(tree_leaves(out), tree_leaves(values), strict=True):
            if isinstance(fake, torch.Tensor):
                self._known.add(fake, value)
        return out


@contextmanager
def python_stand_ins() -> Iterator[None]:
    """Enter a context in which `torch.tensor` and `torch.distributions` accept fake tensors."""
    checked = Distribution._validate_args
    Distribution.set_default_validate_args(False)  # the check would need real values
    try:
        with _NumbersFromTensors():
            yield
    finally:
        Distribution.set_default_validate_args(checked)


class _NumbersFromTensors(TorchFunctionMode):
    """Lets `torch.tensor` read numbers out of a list of fake tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.tensor, torch.as_tensor) and isinstance(args[0], (list, tuple)):
            args = (tree_map_only(torch.Tensor, lambda tensor: tensor.tolist(), args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _computable(func: Any, written: list[torch.Tensor]) -> bool:
    """True if the operator returns the same result each time, or an order, and changes only fake tensors."""
    if torch.Tag.nondeterministic_seeded in func.tags and func not in _ORDERS:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:  # within vmap no other tensors can be made
        return False
    return all(isinstance(tensor, FakeTensor) for tensor in written)


class _KnownValues:
    """Values of fake tensors, by storage: views of one fake storage are views of one real tensor."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}
        self._sweep_at = 1024

    def add(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        if value.is_meta or not _plain(fake) or torch._debug_has_internal_overlap(fake) == _OVERLAPS:
            return
        storage = fake.untyped_storage()
        # A known storage has the value already: another view was added, or `real` has written to it.
        if storage._cdata in self._storages or not _is_small(fake):
            return
        with no_dispatch():
            real = torch.UntypedStorage(storage.nbytes())
            # The value is copied: a forward that writes to its batch must not change the user's batch.
            _view(fake, real).copy_(value)
        self._sweep()
        self._storages[storage._cdata] = (StorageWeakRef(storage), real)

    def value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a real tensor with the values of a fake one; `None` if the values are unknown."""
        if not _plain(tensor):
            return None
        if not isinstance(tensor, FakeTensor):
            small = tensor.numel() * tensor.element_size() <= _KNOWN_BYTES
            with no_dispatch():
                return tensor.detach().clone() if small and not tensor.is_meta else None
        known = self._storages.get(tensor.untyped_storage()._cdata)
        if known is None:
            return None
        with no_dispatch():
            return _view(tensor, known[1])

    def remove(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, FakeTensor):
            self._storages.pop(tensor.untyped_storage()._cdata, None)

    def _sweep(self) -> None:
        """Forget storages that were freed. Until then, their weak references reserve their addresses."""
        if len(self._storages) >= self._sweep_at:
            self._storages = {key: kept for key, kept in self._storages.items() if not kept[0].expired()}
            self._sweep_at = max(1024, 2 * len(self._storages))


def _is_small(tensor: torch.Tensor) -> bool:
    """True if the values of a tensor may be kept."""
    # The size of the storage decides, because all of it is kept: a small view may have a large storage.
    return _plain(tensor) and tensor.untyped_storage().nbytes() <= _KNOWN_BYTES


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_complex() and not tensor.is_quantized


def _view(like: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of `storage` with shape and strides of a fake tensor."""
    empty = torch.empty(0, dtype=like.dtype, device="cpu")
    return empty.set_(storage, like.storage_offset(), like.shape, like.stride())


def _or_ones(value: torch.Tensor | None, fake: torch.Tensor) -> torch.Tensor:
    return torch.ones(fake.shape, dtype=fake.dtype, device="cpu") if value is None else value


def _grouped_mm(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
    """Return the fake result of a grouped product in fp32. torch 2.13's fake operator takes bf16 only."""
    product = (left.shape[-2], right.shape[-1])
    if left.dim() != right.dim():  # the groups lie one after the other
        return left.new_empty(product)
    return left.new_empty((left.shape[0] if ends is None else ends.shape[0], *product))
