"""Storages that hold a copy of values which are elsewhere: they can be read, but not changed or shared."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar, cast

import torch

from headwater.core.errors import StreamError

Storage = torch.UntypedStorage | torch.TypedStorage
S = TypeVar("S", bound=Storage)


class _ReadOnly:
    """Methods that raise `StreamError`, because they would change a copy alone."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise StreamError(
            "this storage is a copy of values in a file or in the weight store, which would not change",
            remedy="write to the tensor, for example tensor.copy_(values); share a copy, tensor.clone()",
        )

    share_memory_ = fill_ = copy_ = resize_ = byteswap = __setitem__ = _refuse


class _ReadOnlyUntyped(_ReadOnly, torch.UntypedStorage):
    pass


class _ReadOnlyTyped(_ReadOnly, torch.TypedStorage):
    pass


_CLASSES = {torch.UntypedStorage: _ReadOnlyUntyped, torch.TypedStorage: _ReadOnlyTyped}


def read_only(storage: S) -> S:
    """Return the storage, whose methods that change or share it raise `StreamError` from now on."""
    found = cast(Any, storage)
    found.__class__ = _CLASSES.get(type(storage), type(storage))
    return storage
