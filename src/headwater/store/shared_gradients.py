"""Gradients of several ranks, summed where all of them reach the sums."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from headwater.core.errors import StreamError
from headwater.core.stage import StageSpec
from headwater.fabric.fabric import Board, Fabric
from headwater.fabric.link import Link
from headwater.store.exchange import Exchange
from headwater.store.gradients import GradientSum, ParamKey, gradient_norm
from headwater.store.hold import Gradients, MemoryHold
from headwater.store.sums import Sums


class SharedGradientSum(GradientSum):
    """Sums the gradients of all ranks.

    Each sum is added to in turns: rank 0, rank 1, … for the first micro-batch, then for the next; so the
    order of the additions, and with it every bit, is the same each time. A rank that has no gradient for a
    parameter lets its turn go by at the end of the micro-batch. A parameter that is used in several places
    may get a second gradient in a micro-batch; these are added in turns of their own. Additions run on a
    thread beside the computation, which gets no further ahead of them than the gradients of one stage.

    Args:
        stages: the stages.
        fabric: the ranks.
        sums: where the sums lie.
    """

    def __init__(self, stages: Sequence[StageSpec], fabric: Fabric, sums: Sums) -> None:
        super().__init__(stages, MemoryHold(), None)
        self._fabric, self._sums = fabric, sums
        self._keys = [(s.index, i) for s in stages for i, p in enumerate(s.params) if p.requires_grad]
        self._slots = {key: slot for slot, key in enumerate(self._keys)}
        self._turns = Board(fabric, len(self._keys))  # taken so far, of all ranks together
        self._written = Board(fabric, len(self._keys))  # the step that has put something there
        self._measured = fabric.allocate(4 * len(self._keys))[: 4 * len(self._keys)].view(torch.float32)
        self._step = 0
        self._rounds = 0  # of turns that this rank has finished; two in each micro-batch
        self._received: set[ParamKey] = set()
        self._late: dict[ParamKey, torch.Tensor] = {}
        self._committed: set[ParamKey] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headwater-reduce")
        self._adding: deque[tuple[Future[None], int]] = deque()  # and the bytes of the gradient
        self._adding_bytes = 0
        self._adding_to: int | None = None  # the stage

    def _exchange_by(self, link: Link) -> Exchange:
        """What adds up these sums and those of other hosts."""
        wire = {key: self._stages[key[0]].params[key[1]].wire_dtype for key in self._keys}
        return Exchange(link, self._sums, wire)

    # in

    def add(self, stage: int, param: int, gradient: torch.Tensor, *, last: bool) -> bool:
        key = (stage, param)
        if key in self._received:
            earlier = self._late.get(key)
            self._late[key] = gradient if earlier is None else earlier + gradient
        else:
            self._received.add(key)
            self._submit(key, gradient, self._rounds)
        return False

    def settle(self, stage: int) -> None:
        """Nothing: sums lie where they stay."""

    def end_micro_batch(self) -> None:
        """Let turns go by that this rank has no use for."""
        for key in self._keys:
            if key not in self._received:
                self._submit(key, None, self._rounds)
        for key in self._keys:
            self._submit(key, self._late.pop(key, None), self._rounds + 1)
        self._rounds += 2
        self._received.clear()

    def _submit(self, key: ParamKey, gradient: torch.Tensor | None, round_: int) -> None:
        self._add_later(gradient, self._take_turn, key, gradient, round_, self._step)

    def _add_later(
        self, gradient: torch.Tensor | None, take_turn: Callable[..., None], *args: object
    ) -> None:
        num_bytes = 0 if gradient is None else gradient.nbytes
        self._adding.append((self._thread.submit(take_turn, *args), num_bytes))
        self._adding_bytes += num_bytes

    def _end_first(self) -> None:
        """Return when the first gradient that waits to be added is."""
        adding, num_bytes = self._adding.popleft()
        adding.result()
        self._adding_bytes -= num_bytes

    @property
    def is_ahead(self) -> bool:
        while self._adding and self._adding[0][0].done():
            self._end_first()
        return self._adding_bytes > self._sums.largest_gradient_bytes

    def catch_up(self) -> None:
        while self.is_ahead:
            self._end_first()

    def _take_turn(self, key: ParamKey, gradient: torch.Tensor | None, round_: int, step: int) -> None:
        slot, turn = self._slots[key], round_ * self._fabric.local_size + self._fabric.local_rank
        self._turns.wait(slot, turn, f"the gradient of {self._stages[key[0]].params[key[1]].name}")
        if gradient is not None:
            if self._adding_to != key[0]:
                self._rest()
            self._adding_to = key[0]
            if self._written.read(slot) == step:
                self._sums.add(key, gradient)
            else:
                self._sums.write(key, gradient)
                self._written.post(slot, step)
        self._turns.post(slot, turn + 1)

    def _rest(self) -> None:
        """The last rank of the host has ended with the stage to which it has added."""
        if self._adding_to is not None and self._fabric.local_rank == self._fabric.local_size - 1:
            self._sums.rest(self._adding_to)
        self._adding_to = None

    def _added(self) -> None:
        """Return when this rank has taken all its turns."""
        while self._adding:
            self._end_first()
        self._rest()

    def complete(self) -> None:
        """Return when the gradients of all ranks are there, and are measured."""
        self._added()
        for slot in range(len(self._keys)):
            self._turns.wait(slot, self._rounds * self._fabric.local_size, "the gradients of all ranks")
        self._measure_all()
        self.present = {k for k, slot in self._slots.items() if self._written.read(slot) == self._step}
        for key in self._keys:
            if key in self.present:
                norm = self._norms[key] = self._measured[self._slots[key]].clone()
                if self.first_bad is None and not bool(norm.isfinite()):
                    self.first_bad = key[0]

    def _measure_all(self) -> None:
        """Let every rank know the norm of each sum."""
        for key, slot in self._slots.items():
            if self._written.read(slot) == self._step and self._is_mine(slot):
                self._measured[slot] = gradient_norm(self._sums.read(key))
        self._fabric.barrier("the norms of the gradients")

    def _is_mine(self, slot: int) -> bool:
        """Whether this rank of the host measures and changes a sum."""
        return slot % self._fabric.local_size == self._fabric.local_rank

    def norm(self, keys: Sequence[ParamKey]) -> torch.Tensor:
        norms = [self._norms[key] for key in keys]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    # out

    def commit(self, keys: Iterable[ParamKey]) -> None:
        self._committed.update(keys)
        self._forget_all()

    def _forget_all(self) -> None:
        self.present.clear()
        self._norms.clear()
        self.first_bad = None

    def take(self, stage: int) -> Gradients | None:
        keys = [(stage, param) for param in range(len(self._stages[stage].params))]
        found = [self._whole(key) if key in self._committed else None for key in keys]
        self._committed.difference_update(keys)
        return found if any(each is not None for each in found) else None

    def _whole(self, key: ParamKey) -> torch.Tensor:
        return self._sums.read(key).view(self._stages[key[0]].params[key[1]].shape)

    def put_back(self, stage: int, gradients: Gradients) -> None:
        self._committed.update((stage, p) for p, each in enumerate(gradients) if each is not None)

    def drop(self, stage: int, param: int) -> None:
        self.present.discard((stage, param))

    def discard(self) -> None:
        """A new step begins: what is there counts no more."""
        self._forget_all()
        self._step += 1

    def discard_stage(self, stage: int) -> None:
        self.take(stage)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._sums.close()
        super().close()

    # sums that are looked at and changed before they are used

    def expose(self, stage: int, param: int) -> torch.Tensor | None:
        """A copy of the sum of one parameter, after `complete`."""
        return self._whole((stage, param)).clone() if (stage, param) in self.present else None

    def multiply(self, stage: int, param: int, factor: Callable[[], torch.Tensor]) -> None:
        if (stage, param) in self.present and self._is_mine(self._slots[stage, param]):
            with self._sums.changing((stage, param)) as total:
                total.mul_(factor().reshape(-1))

    # what a loop of one's own would need

    def replace(self, stage: int, param: int, gradient: torch.Tensor) -> None:
        raise _not_with_ranks()

    def remember(self, present: Iterable[ParamKey] | None = None) -> None:
        raise _not_with_ranks()


def _not_with_ranks() -> StreamError:
    return StreamError(
        "gradients of several ranks cannot be looked at or changed", remedy="use one rank: num_csx 1"
    )
