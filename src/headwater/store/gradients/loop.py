"""The gradients of several ranks in a user's loop. The loop may read, change and keep them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, final

import torch

from headwater.core.stage import ParamKey, StageSpec
from headwater.fabric.fabric import Fabric
from headwater.store.gradients.norms import gradient_norm
from headwater.store.gradients.port import EditableGradients, Gradients
from headwater.store.gradients.status import GradientStatus

if TYPE_CHECKING:
    from headwater.store.gradients.lasting import LastingSums


@final
class LoopGradients(EditableGradients):
    """The gradients of several ranks in a user's loop, on one host or on several.

    Args:
        stages: the stages.
        host: the ranks of this host.
        sums: the sums of all hosts.
    """

    is_shared = True

    def __init__(self, stages: Sequence[StageSpec], host: Fabric, sums: LastingSums) -> None:
        self.status = GradientStatus()
        self._stages = stages
        self._host = host
        self._sums = sums
        # Sums that commits have taken and updates have not: a copy, or `None` if the sum is in the storage.
        self._taken: dict[ParamKey, torch.Tensor | None] = {}
        self._before: dict[ParamKey, torch.Tensor] = {}  # copies of the remembered sums

    def add(
        self, key: ParamKey, gradient: torch.Tensor, *, last: bool, norm: torch.Tensor | None = None
    ) -> bool:
        return key not in self.status.consumed and self._sums.shared.add(key, gradient)

    def drain(self) -> None:
        self._sums.shared.drain()

    def end_micro_batch(self) -> None:
        self._sums.shared.end_micro_batch()

    def complete(self) -> None:
        self.status.present = self._sums.find()
        shared = self._sums.shared
        shared.measure(key for key in self.status.present if not self._sums.is_copied(key))
        # Each rank has measured some of the sums.
        self._host.barrier("the norms of the gradients")
        for key in sorted(self.status.present):
            is_copied = self._sums.is_copied(key)
            self.status.measure(key, gradient_norm(self._sums.value(key)) if is_copied else shared.norm(key))

    def norm(self, keys: Sequence[ParamKey]) -> torch.Tensor:
        return self.status.norm(keys)

    def commit(self, keys: Iterable[ParamKey], stages: Collection[int]) -> None:
        for key in keys:
            # A rank that does not update the stage does this too: the sum must end on all ranks.
            copy = self._sums.take(key)
            if key[0] in stages:
                self._taken[key] = copy
            self.status.leave(key)
        self.status.first_bad = None

    def take(self, stage: int) -> Gradients | None:
        found: Gradients = []
        for param in range(len(self._stages[stage].params)):
            key = (stage, param)
            copy = self._taken.get(key)
            is_in_storage = key in self._taken and copy is None
            found.append(self._sums.shared.whole(key) if is_in_storage else copy)
            self._taken.pop(key, None)
        return found if any(each is not None for each in found) else None

    def put_back(self, stage: int, gradients: Gradients) -> None:
        for param, gradient in enumerate(gradients):
            if gradient is not None:
                self._taken[stage, param] = gradient

    def drop(self, key: ParamKey) -> None:
        self.status.drop_consumed(key)
        self.status.leave(key)
        self._sums.give_up(key)

    def discard(self) -> None:
        self._sums.give_up_all()
        self.status.leave_all()
        self.status.drop_all_consumed()

    def borrow(self, key: ParamKey) -> torch.Tensor | None:
        return self._sums.lend(key)

    def multiply(self, key: ParamKey, factor: Callable[[], torch.Tensor]) -> None:
        total = self.borrow(key)
        if total is not None:
            total.mul_(factor())

    def replace(self, key: ParamKey, gradient: torch.Tensor) -> None:
        self._sums.replace(key, gradient)
        self.status.present.add(key)
        self.status.drop_consumed(key)

    def loop_tensor(self, key: ParamKey, like: torch.Tensor) -> torch.Tensor | None:
        return None

    def remember(self, keys: Collection[ParamKey] | None = None) -> None:
        self.forget()
        self.status.present = self._sums.find()
        self.status.remember(keys)
        self._before = {key: self._sums.value(key).clone() for key in self.status.remembered}

    def restore(
        self, taken: Collection[ParamKey], waiting: Collection[ParamKey], undone: Collection[ParamKey]
    ) -> None:
        # All ranks have given up the step at the same place, so all of them pass the rest of their turns.
        if self._sums.shared.turns.has_begun:
            self.end_micro_batch()
        self.status.present = self._sums.find()
        # All sums are given up, so that none that was added since `remember` stays valid.
        self._sums.give_up_all()
        # Sums of other commits stay: another thread may be about to take them for an earlier update.
        for key in undone:
            self._taken.pop(key, None)
        self.status.restore({*taken, *waiting})
        for key in self.status.present:
            self._sums.replace(key, self._before[key])
        self.forget()

    def forget(self) -> None:
        self.status.forget()
        self._before = {}

    def close(self) -> None:
        self._sums.close()
