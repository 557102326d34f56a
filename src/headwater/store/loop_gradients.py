"""Gradients of several ranks in a loop of one's own, which looks at them and changes them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from headwater.core.stage import StageSpec
from headwater.fabric.fabric import Board, Fabric
from headwater.store.gradients import ParamKey, gradient_norm
from headwater.store.hold import Gradients
from headwater.store.shared_gradients import SharedGradientSum
from headwater.store.sums import Sums


class LoopGradientSum(SharedGradientSum):
    """Sums of which each is on its own: it lasts until a commit takes it or it is dropped.

    Who looks at a sum gets a copy, which counts in place of the sum from then on; ranks change their copies
    alike. Where more is added, rank 0 puts its copy back first. It begins with a micro-batch when all ranks
    have come to it, so that no rank finds more in a sum than it has given and waited for.

    Args:
        stages: the stages.
        fabric: the ranks, on one host.
        sums: where the sums lie.
    """

    def __init__(self, stages: Sequence[StageSpec], fabric: Fabric, sums: Sums) -> None:
        super().__init__(stages, fabric, sums)
        self._entered = Board(fabric, fabric.size)  # rounds of turns that each rank has come to
        self._clock = 1  # grows with every sum that is given up
        self._current = dict.fromkeys(self._keys, self._clock)  # when the sums of now began
        self._copies: dict[ParamKey, torch.Tensor] = {}
        self._taken: dict[ParamKey, torch.Tensor | None] = {}  # by commits, not yet by updates: copies
        self._sums_before: dict[ParamKey, torch.Tensor] = {}  # since `remember`

    # in

    def add(self, stage: int, param: int, gradient: torch.Tensor, *, last: bool) -> bool:
        if (stage, param) in self.spent:
            return False
        return super().add(stage, param, gradient, last=last)

    def _submit(self, key: ParamKey, gradient: torch.Tensor | None, round_: int) -> None:
        self._entered.post(self._fabric.rank, self._rounds + 1)
        self._exposed.pop(key, None)
        copy, current = self._copies.pop(key, None), self._current[key]
        before = self._before_adding(key, copy, current)
        self._add_later(gradient, self._add_in_turn, key, before, gradient, round_, current)

    def _before_adding(
        self, key: ParamKey, copy: torch.Tensor | None, current: int
    ) -> Callable[[], None] | None:
        """What rank 0 is to do before more is added to a sum: put back its copy, if it has one."""
        return None if copy is None else functools.partial(self._put_back, key, copy, current)

    def _put_back(self, key: ParamKey, copy: torch.Tensor, current: int) -> None:
        self._sums.write(key, copy)
        self._written.post(self._slots[key], current)

    def _add_in_turn(
        self,
        key: ParamKey,
        before: Callable[[], None] | None,
        gradient: torch.Tensor | None,
        round_: int,
        current: int,
    ) -> None:
        if self._fabric.rank == 0:
            for rank in range(self._fabric.size):
                self._entered.wait(rank, round_ - round_ % 2 + 1, f"rank {rank} to come to the backward")
            if before is not None:
                name = self._stages[key[0]].params[key[1]].name
                self._turns.wait(self._slots[key], round_ * self._fabric.size, f"the gradient of {name}")
                before()
        self._take_turn(key, gradient, round_, current)

    def _is_there(self, key: ParamKey) -> bool:
        """Whether any rank has given something to a sum; waits until all that were to do so have."""
        self._added()
        rounds = self._rounds + (key in self._received)
        self._turns.wait(self._slots[key], rounds * self._fabric.size, "the gradients of all ranks")
        return self._written.read(self._slots[key]) == self._current[key]

    def _find_present(self) -> None:
        self.present = {*(key for key in self._keys if self._is_there(key)), *self._copies}

    def complete(self) -> None:
        self._find_present()
        for key in self.present.difference(self._copies):
            if self._slots[key] % self._fabric.size == self._fabric.rank:
                self._measured[self._slots[key]] = gradient_norm(self._whole(key))
        self._fabric.barrier("the norms of the gradients")
        for key in sorted(self.present):
            copy = self._copies.get(key)
            norm = self._measured[self._slots[key]].clone() if copy is None else gradient_norm(copy)
            self._norms[key] = norm
            if self.first_bad is None and not bool(norm.isfinite()):
                self.first_bad = key[0]

    # out

    def commit(self, keys: Iterable[ParamKey]) -> None:
        for key in keys:
            copy = self._copies.pop(key, None)
            if copy is not None and key in self._exposed:
                lent = weakref.ref(self._exposed.pop(key))
                copy = copy if lent() is None else copy.clone()  # the update changes it in place
            self._taken[key] = copy
            self._give_up(key)
        self.first_bad = None

    def _give_up(self, key: ParamKey) -> None:
        """What is in a sum counts no more."""
        self._forget(key)
        self._copies.pop(key, None)
        self._clock += 1
        self._current[key] = self._clock

    def take(self, stage: int) -> Gradients | None:
        keys = [(stage, param) for param in range(len(self._stages[stage].params))]
        found = [self._value(key, self._taken.pop(key)) if key in self._taken else None for key in keys]
        return found if any(each is not None for each in found) else None

    def leave(self, stage: int) -> None:
        for param in range(len(self._stages[stage].params)):
            self._taken.pop((stage, param), None)

    def put_back(self, stage: int, gradients: Gradients) -> None:
        for param, gradient in enumerate(gradients):
            if gradient is not None:
                self._taken[stage, param] = gradient

    def drop(self, stage: int, param: int) -> None:
        self.spent.discard((stage, param))
        self._give_up((stage, param))

    def discard(self) -> None:
        for key in {*self._keys, *self._copies}:
            self._give_up(key)
        self.spent.clear()
        self.first_bad = None

    def discard_stage(self, stage: int) -> None:
        self.take(stage)
        for param in range(len(self._stages[stage].params)):
            self._give_up((stage, param))

    # gradients that the user looks at

    def expose(self, stage: int, param: int) -> torch.Tensor | None:
        key = (stage, param)
        if key not in self._copies:
            if key not in self._slots or not self._is_there(key):
                return None
            self._copies[key] = self._whole(key).clone()
        return self._exposed.setdefault(key, self._copies[key].detach())

    def replace(self, stage: int, param: int, gradient: torch.Tensor) -> None:
        key = (stage, param)
        self._exposed.pop(key, None)
        self._copies[key] = gradient.detach()
        self.present.add(key)
        self.spent.discard(key)

    # a step that may have to be undone

    def remember(self, present: Iterable[ParamKey] | None = None) -> None:
        self.forget()
        self._find_present()
        before = self.present if present is None else self.present.intersection(present)
        self._sums_before = {key: self._value(key, self._copies.get(key)).clone() for key in before}
        self._before = frozenset(before), frozenset(self.spent)

    def _value(self, key: ParamKey, copy: torch.Tensor | None) -> torch.Tensor:
        return self._whole(key) if copy is None else copy

    def restore(self, taken: Collection[ParamKey], waiting: Collection[ParamKey]) -> None:
        """Bring back the sums of `remember`; every rank has given up the step at the same place."""
        if self._received:
            self.end_micro_batch()
        self._find_present()
        before = self._before[0].difference(taken, waiting)
        for key in {*self._keys, *self.present}:
            self._give_up(key)
        self._taken = {key: total for key, total in self._taken.items() if key in waiting}
        self._copies.update((key, kept) for key, kept in self._sums_before.items() if key in before)
        self.spent, self.first_bad = set(self._before[1]), None
        self.forget()

    def forget(self) -> None:
        self._before = frozenset(), frozenset()
        self._sums_before = {}
