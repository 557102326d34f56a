"""Counts the bytes of tensors for as long as they are alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch


class AliveTensors:
    """The storages that somebody still holds a tensor of, whoever made them.

    Attributes:
        num_bytes: their bytes.

    Args:
        ignored: tensors whose storages do not count.
    """

    def __init__(self, ignored: Iterable[torch.Tensor] = ()) -> None:
        self.num_bytes = 0
        self._known = {self._key(tensor.untyped_storage()) for tensor in ignored}

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor, if it does not count already, until it is gone."""
        storage = tensor.untyped_storage()
        key = self._key(storage)
        if key not in self._known:
            self._known.add(key)
            self.num_bytes += storage.nbytes()
            weakref.finalize(storage, self._forget, key, storage.nbytes()).atexit = False

    @staticmethod
    def _key(storage: torch.UntypedStorage) -> int:
        return int(storage._cdata)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.num_bytes -= num_bytes
