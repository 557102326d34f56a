"""The gradients of the ranks of one host, in shared memory or in files that all of them can read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import final

import torch

from headwater.core.stage import ParamKey, StageSpec
from headwater.fabric.fabric import Fabric
from headwater.store.gradients.port import Gradients, GradientSink
from headwater.store.gradients.rank_sums import Beginning, RankSums
from headwater.store.gradients.status import GradientStatus
from headwater.store.gradients.storage import GradientStorage


@final
class RankGradients(GradientSink):
    """The gradients of the ranks of one host, summed in shared memory or files. Updates read them there.

    Attributes:
        sums: the sums of all ranks of the host.
        step: the number of the current step, which is the generation of the sums.
        taken_early: sums of the current step that updates in the backward have taken.

    Args:
        stages: the stages.
        fabric: the ranks.
        storage: where the sums lie.
    """

    is_shared = True

    def __init__(self, stages: Sequence[StageSpec], fabric: Fabric, storage: GradientStorage) -> None:
        self.status = GradientStatus()
        self.step = 0
        # If sums lose their memory, no rank may add before all ranks have released the previous step's sums.
        self.sums = RankSums(
            stages, fabric, storage, lambda _: Beginning(self.step), together=storage.loses_memory
        )
        self._stages = stages
        self._fabric = fabric
        self.taken_early: set[ParamKey] = set()
        self._committed: set[ParamKey] = set()
        self._dropped: set[ParamKey] = set()  # sums that were dropped in this step

    def add(
        self, key: ParamKey, gradient: torch.Tensor, *, last: bool, norm: torch.Tensor | None = None
    ) -> bool:
        return self.sums.add(key, gradient)

    def drain(self) -> None:
        self.sums.drain()

    def end_micro_batch(self) -> None:
        self.sums.end_micro_batch()

    def complete(self) -> None:
        self.wait_for_sums()
        filled = [key for key in self.filled() if key not in self.taken_early]
        self.sums.measure(filled)
        # Each rank has measured some of the sums, and all read every norm.
        self._fabric.barrier("the norms of the gradients")
        self.publish(filled)

    def wait_for_sums(self) -> None:
        """Block until the gradients of all ranks of the host are summed."""
        self.sums.finish()
        for key in self.sums.keys:
            self.sums.wait_for_all(key)

    def filled(self) -> list[ParamKey]:
        """Return the parameters to whose sums a rank has added in this step.

        Call it while all ranks are in the same step: the next step's first addition marks a sum as a new one.
        """
        return [key for key in self.sums.keys if self.sums.has(key, self.step)]

    def publish(self, filled: Sequence[ParamKey]) -> None:
        """Set `status` from the norms that the ranks have computed.

        Args:
            filled: the sums of this step, as `filled` returns them.
        """
        self.status.present = set(filled) - self._dropped
        for key in filled:
            if key not in self._dropped:
                self.status.measure(key, self.sums.norm(key))

    def norm(self, keys: Sequence[ParamKey]) -> torch.Tensor:
        return self.status.norm(keys)

    def commit(self, keys: Iterable[ParamKey], stages: Collection[int]) -> None:
        committed = set(keys)
        mine = {key for key in committed if key[0] in stages}
        self._committed.update(mine)
        for stage in {stage for stage, _ in committed - mine}:
            self.sums.storage.release(stage)
        for key in committed:
            self.status.leave(key)
        self.status.first_bad = None

    def take(self, stage: int) -> Gradients | None:
        keys = [(stage, param) for param in range(len(self._stages[stage].params))]
        found = [self.sums.whole(key) if key in self._committed else None for key in keys]
        self._committed.difference_update(keys)
        return found if any(each is not None for each in found) else None

    def put_back(self, stage: int, gradients: Gradients) -> None:
        unused = [(stage, param) for param, each in enumerate(gradients) if each is not None]
        self._committed.update(unused)
        if not unused:
            self.sums.storage.release(stage)

    def drop(self, key: ParamKey) -> None:
        if key in self.status.present:
            # The shared sum stays as it is, so each later `publish` must leave it out.
            self._dropped.add(key)
            self.status.leave(key)

    def discard(self) -> None:
        self.status.leave_all()
        self._dropped.clear()
        self.taken_early.clear()
        self.step += 1  # the first addition of the step replaces what is in the sums

    def borrow(self, key: ParamKey) -> torch.Tensor | None:
        return self.sums.whole(key).clone() if key in self.status.present else None

    def loop_tensor(self, key: ParamKey, like: torch.Tensor) -> torch.Tensor | None:
        return None

    def multiply(self, key: ParamKey, factor: Callable[[], torch.Tensor]) -> None:
        if key in self.status.present and self.sums.is_mine(key):
            with self.sums.storage.changing(key) as total:
                total.mul_(factor().reshape(-1))

    def close(self) -> None:
        self.sums.close()
