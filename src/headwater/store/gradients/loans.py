"""The tensors by which a user's loop reads gradients, and whether it can still reach their memory."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import final

import torch

from headwater.core.owned_memory import ONLY_OWNER, storage_references
from headwater.core.stage import ParamKey


@final
class Loans:
    """The last tensor of each gradient that a user's loop got. The loop may have dropped it since.

    Attributes:
        tensors: weak references to these tensors.
    """

    def __init__(self) -> None:
        self.tensors: dict[ParamKey, weakref.ref[torch.Tensor]] = {}
        # By stage and parameter, a tensor with memory that the loop may still reach after a loan has ended.
        self._shared: dict[int, dict[int, torch.Tensor]] = {}

    def note(self, key: ParamKey, lent: torch.Tensor) -> None:
        """Record the tensor that the loop gets as a gradient."""
        self.forget(key)
        self.tensors[key] = weakref.ref(lent)

    def end(self, stage: int, aliases: Mapping[int, torch.Tensor]) -> None:
        """Keep the memory of gradients that are not lent any more, if the loop can still reach that memory.

        A loop may keep another tensor with the same memory, for example a flat tensor for all gradients.

        Args:
            stage: the stage of the gradients.
            aliases: by parameter, the only tensor of the store with the gradient's memory.
        """
        shared = self._shared.setdefault(stage, {})
        shared.update((param, alias) for param, alias in aliases.items() if alias.layout is torch.strided)
        for param in _unused(shared):
            del shared[param]

    def forget(self, key: ParamKey) -> None:
        """Forget which tensor the loop got as the gradient of a parameter."""
        self.tensors.pop(key, None)
        self._shared.get(key[0], {}).pop(key[1], None)

    def clear(self) -> None:
        """Forget which tensors the loop got."""
        self.tensors.clear()
        self._shared.clear()

    def last(self, key: ParamKey) -> torch.Tensor | None:
        """Return the last tensor that the loop got as a gradient, if the loop can still reach its memory."""
        loan = self.tensors.get(key)
        tensor = None if loan is None else loan()
        shared = self._shared.get(key[0])
        if tensor is not None or not shared or key[1] not in shared:
            return tensor
        for param in _unused(shared):
            del shared[param]
        return shared.get(key[1])

    def loop_tensor(self, key: ParamKey, like: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor of `last` if it is dense, with the dtype and shape of `like`; else `None`."""
        mine = self.last(key)
        if mine is None or (mine.layout, mine.dtype, mine.shape) != (like.layout, like.dtype, like.shape):
            return None
        return None if mine.is_sparse else mine

    def in_loop_memory(self, key: ParamKey, total: torch.Tensor | None) -> torch.Tensor | None:
        """Copy a sum into the tensor that the loop keeps for it, and return that; else return the sum."""
        mine = None if total is None else self.loop_tensor(key, total)
        return total if total is None or mine is None else filled(mine, total).detach()


def filled(mine: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Copy a sum into the loop's tensor `mine`, unless they share memory, and return `mine`."""
    if mine.data_ptr() != total.data_ptr():
        mine.detach().copy_(total)
    return mine


def _unused(aliases: Mapping[int, torch.Tensor]) -> list[int]:
    """Return the keys of the aliases whose memory no tensor outside of `aliases` uses."""
    memory = {key: alias.untyped_storage()._cdata for key, alias in aliases.items()}
    own = Counter(memory.values())
    return [
        key for key, alias in aliases.items() if storage_references(alias) < ONLY_OWNER + own[memory[key]]
    ]


def is_used_elsewhere(gradient: torch.Tensor | None) -> bool:
    """True if another tensor, such as a view that the loop keeps, uses the memory of a dense gradient."""
    if gradient is None or gradient.layout is not torch.strided:
        return False
    return storage_references(gradient) > ONLY_OWNER
