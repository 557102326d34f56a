"""Tensors whose values stay in a file or in the weight store until an operation needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils._pytree import tree_any, tree_map_only

from headwater.core.errors import StreamError
from headwater.core.gather import gather
from headwater.core.interrupts import uninterrupted
from headwater.core.operators import argument_values, written_arguments
from headwater.core.read_only_storage import read_only
from headwater.core.transfers import RUN_BYTES

ReadPieces = Callable[[], Iterator[Tensor]]
"""Function that yields all elements of a tensor in pieces. A piece is valid until the next is yielded."""

_CPU = torch.device("cpu")
_DETACH = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class StoredTensor(Tensor):
    """A tensor without memory: its values are read each time an operation needs them.

    Shape, dtype, `detach`, `requires_grad_` and similar functions read no values. Every other operation reads
    the values again and returns plain tensors; so do `clone`, `copy.deepcopy` and pickling. A `LazyTensor` is
    a stored tensor that cannot be changed. Changes of the engine's stored tensors are written to the weight
    store.

    Pickling and `torch.save` read the values into host memory, also for a tensor on a GPU.

    Args:
        read_pieces: reads the values. Lazy tensors with equal `read_pieces` are the same weights (tied). It
            may have a method `in_memory`, which returns a plain tensor over host memory with the present
            values, or `None`. Then this memory is used where a program asks for that of the stored tensor.
        shape: its shape.
        dtype: its dtype.
        device: its device, to which values are copied; the CPU if not given.
        strides: its strides, also of plain tensors with its values; row-major if not given.

    Attributes:
        read_pieces: as given.
    """

    read_pieces: ReadPieces
    _kept: Tensor | None  # the values, once they have been read for `data_ptr` or `untyped_storage`
    _shared: Tensor  # the copy that other processes use

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ForkingPickler.register(cls, _reduce_for_process)

    @staticmethod
    def __new__(
        cls: type[Self],
        read_pieces: ReadPieces,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device = _CPU,
        strides: Sequence[int] | None = None,
    ) -> Self:
        tensor = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), strides=strides, dtype=dtype, device=device
        )
        tensor.read_pieces, tensor._kept = read_pieces, None
        return tensor

    @uninterrupted  # the iterator of the pieces may hold a lock, which an exception would keep
    def materialize(self) -> Tensor:
        """Return a plain tensor with the values, in new memory."""
        return self._gathered().to(self.device)

    @uninterrupted
    def _gathered(self) -> Tensor:
        values = gather(self.read_pieces(), self.shape, self.dtype)
        if values.stride() == self.stride():
            return values
        # Fused optimizers of torch need state with the strides of its parameter.
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=_CPU).copy_(values)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DETACH:
            tensor = args[0]
            return cls(tensor.read_pieces, tensor.shape, tensor.dtype, tensor.device, tensor.stride())
        # From the operator's schema, which also covers operators of other libraries.
        for value in argument_values(written_arguments(func), func, args, kwargs):
            _refuse_write(value)
        args, kwargs = tree_map_only(StoredTensor, StoredTensor.materialize, (args, kwargs))
        return func(*args, **kwargs)

    # Methods that read the values without an operation of torch:

    def numpy(self, *, force: bool = False) -> Any:
        array = self.materialize().numpy(force=force)
        array.flags.writeable = False  # a write to this copy would be lost
        return array

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.materialize().__dlpack__(*args, **kwargs)

    def tolist(self) -> Any:
        return self.materialize().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        # Plain: a copy is made to be changed.
        copy = self._plain()
        if isinstance(self, nn.Parameter):
            copy = nn.Parameter(copy, requires_grad=self.requires_grad)
        memo[id(self)] = copy
        return copy

    def __copy__(self) -> Tensor:
        return self.detach().requires_grad_(self.requires_grad)  # shares the values, as in plain PyTorch

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Not on the device: a program may keep the copies of a model that is larger than the device.
        return self._on_host().detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def _on_host(self) -> Tensor:
        """Return a plain tensor with the present values in host memory, which callers only read."""
        present = self._present()
        return self._gathered() if present is None else present

    def _present(self) -> Tensor | None:
        read = getattr(self.read_pieces, "in_memory", None)
        return None if read is None else read()

    def _plain(self) -> Tensor:
        return self.materialize().requires_grad_(self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={list(self.shape)}, dtype={self.dtype})"


def _reduce_for_process(stored: StoredTensor) -> Any:
    """Pickle a stored tensor for another process, as torch pickles plain tensors: the process gets a copy."""
    # The process opens the memory of the copy later. So the copy must not end before.
    stored._shared = stored._on_host().clone().requires_grad_(stored.requires_grad)
    return reduce_tensor(stored._shared)


@final
class LazyTensor(StoredTensor):
    """A stored tensor that can only be read.

    An operation that would return a view of a plain tensor returns a view of a copy. In-place operations
    raise an error. After a call of `data_ptr` or `untyped_storage` a tensor whose values are in a file keeps
    them in memory. See `StoredTensor`.
    """

    # Every operation reaches __torch_dispatch__, so this layer above it would only cost time.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def whole(cls, read: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype) -> Self:
        """Return a lazy tensor whose values `read` returns in one piece.

        Args:
            read: returns the values; called for each operation that needs them.
            shape: the shape of the tensor.
            dtype: its dtype.
        """
        return cls(lambda: iter([read()]), shape, dtype)

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return a plain tensor with the values, even if dtype and device stay the same."""
        return self.materialize().to(*args, **kwargs)

    def __setitem__(self, index: Any, value: Any) -> None:
        _refuse_write(self)

    def data_ptr(self) -> int:
        return self._in_memory().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return read_only(self._in_memory().untyped_storage())

    def _in_memory(self) -> Tensor:
        """Return a plain tensor with the present values. Later calls return the same memory."""
        present = self._present()
        if present is None:
            if self._kept is None:
                self._kept = self._gathered()  # values in a file do not change
            return self._kept
        if present.stride() == self.stride():
            return present
        # The strides of the values have changed since this tensor was made.
        if self._kept is None:
            self._kept = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=_CPU)
        return self._kept.copy_(present)


def _refuse_write(written: object) -> None:
    if tree_any(lambda leaf: isinstance(leaf, StoredTensor) and isinstance(leaf, nn.Parameter), written):
        raise StreamError(
            "a parameter whose values are in a file or in the weight store cannot be changed in place",
            remedy="train it in a compiled model, or make it of a copy, nn.Parameter(tensor.clone()); "
            "load_state_dict copies without assign=True",
        )
    if tree_any(lambda leaf: isinstance(leaf, StoredTensor), written):
        raise StreamError(
            "a tensor whose values are in a file or in the weight store cannot be changed in place",
            remedy="change a copy, tensor.clone(), and bring it back with load_state_dict",
        )


@final
class Cutter:
    """Joins and divides the pieces of one tensor, in order, to pieces of `count` elements.

    Args:
        count: the elements of a piece.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._rest: list[Tensor] = []
        self._missing = count

    def cut(self, piece: Tensor) -> Iterator[Tensor]:
        """Yield the pieces that are complete with this 1-D piece, each valid until the next is requested."""
        while piece.numel() >= self._missing:
            first, piece = piece[: self._missing], piece[self._missing :]
            yield torch.cat([*self._rest, first]) if self._rest else first
            self._rest, self._missing = [], self._count
        if piece.numel():
            # A piece is valid until the next one.
            self._rest.append(piece.clone())
            self._missing -= piece.numel()

    def rest(self) -> Iterator[Tensor]:
        """Yield the last piece, if the elements do not fill it."""
        if self._rest:
            yield torch.cat(self._rest)


def pieces_of(tensor: Tensor, max_bytes: int = RUN_BYTES) -> Iterator[Tensor]:
    """Yield all elements of any tensor in order, as 1-D tensors on the host.

    Yields:
        Pieces of `max_bytes`; the last may be shorter. A piece is valid until the next one is requested.
    """
    count = max_bytes // tensor.dtype.itemsize
    cutter = Cutter(count)
    for piece in _any_pieces(tensor, count):
        yield from cutter.cut(piece)
    yield from cutter.rest()


def _any_pieces(tensor: Tensor, count: int) -> Iterator[Tensor]:
    if isinstance(tensor, StoredTensor):
        for piece in tensor.read_pieces():
            yield piece.reshape(-1)
    else:
        for piece in tensor.detach().reshape(-1).split(count):
            yield piece.cpu()
