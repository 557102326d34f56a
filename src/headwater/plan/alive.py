"""The bytes of tensors, and a count of the bytes of tensors that are alive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type


def has_storage(tensor: torch.Tensor) -> bool:
    """True if a tensor has one storage for its elements, unlike sparse, nested and wrapped ones."""
    if is_functorch_wrapped_tensor(tensor):  # made inside torch.func.grad or vmap, which may have ended
        return False
    if tensor.is_nested or tensor.layout is not torch.strided or tensor._is_zerotensor():
        return False
    return not _is_wrapper(type(tensor))


@functools.lru_cache(maxsize=256)  # limited, because a program may make any number of classes
def _is_wrapper(kind: type[torch.Tensor]) -> bool:
    """True for a class whose tensors are only wrappers of other tensors."""
    return is_traceable_wrapper_subclass_type(kind)


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; for a sparse tensor, those of its indices and values."""
    if tensor.layout is torch.strided:
        return tensor.numel() * tensor.element_size()
    if tensor.layout is torch.sparse_coo:
        return num_bytes(tensor._indices()) + num_bytes(tensor._values())
    if tensor.layout is torch.jagged:
        return num_bytes(tensor.values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sum(map(num_bytes, (tensor.crow_indices(), tensor.col_indices(), tensor.values())))
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return sum(map(num_bytes, (tensor.ccol_indices(), tensor.row_indices(), tensor.values())))
    return 0  # a layout that is opaque to Python


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor keeps alive: those of its whole storage, if it has one."""
    return tensor.untyped_storage().nbytes() if has_storage(tensor) else num_bytes(tensor)


def memory_key(tensor: torch.Tensor) -> int:
    """Return a key that is equal for tensors with the same storage, valid while one of them exists."""
    # Not `data_ptr`: fake tensors have no data.
    return int(tensor.untyped_storage()._cdata) if has_storage(tensor) else id(tensor)


class AliveTensors:
    """Count of the bytes of storages, each until the last tensor that uses it is freed.

    Attributes:
        num_bytes: bytes of these storages.

    Args:
        ignored: tensors whose storages are not counted. Those without a storage are never counted.
    """

    def __init__(self, ignored: Iterable[torch.Tensor] = ()) -> None:
        self.num_bytes = 0
        self._known = {self._key(tensor.untyped_storage()) for tensor in ignored if has_storage(tensor)}

    def add(self, tensor: torch.Tensor) -> None:
        """Count the bytes of a tensor's storage until it is freed. Each storage is counted only once."""
        if not has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        key = self._key(storage)
        if key not in self._known:
            self._known.add(key)
            self.num_bytes += storage.nbytes()
            # The function is not called when the interpreter exits: the count is of no use then.
            weakref.finalize(storage, self._forget, key, storage.nbytes()).atexit = False

    @staticmethod
    def _key(storage: torch.UntypedStorage) -> int:
        return int(storage._cdata)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.num_bytes -= num_bytes
