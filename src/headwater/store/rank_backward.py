"""Updates that the ranks of one host apply during their backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

from headwater.core.errors import NonFiniteError
from headwater.core.stage import ParamKey, StageSpec
from headwater.fabric.fabric import Board, Fabric
from headwater.store.gradients.ranks import RankGradients
from headwater.store.in_backward import BackwardSchedule, BackwardUpdates, RunningStep
from headwater.store.layout import MOST_AHEAD

if TYPE_CHECKING:
    from headwater.store.ledger import Ledger
    from headwater.store.stages import StageAccess


@final
class RankBackwardUpdates(BackwardUpdates):
    """Updates in the backwards of the ranks of one host, which share weights and gradient sums.

    A stage is handed over by each rank when its own backward does not need it any more. When all ranks have
    done so, each measures its part of the sums. When all have measured, each updates its part of the stage.
    No rank waits for one of these events. A rank looks for them after each gradient that it has sent, and the
    commit takes the stages that are left. It does not matter if only some ranks have begun the update of such
    a stage: the others find the same gradients, and the commit has the same number.

    A rank waits only for ranks whose backward is far behind its own. So few stages have gradients at a time.

    Args:
        stages: the stages.
        schedule: when stages are used, and which thread updates them.
        access: locks stages and applies updates.
        ledger: the commits.
        gradients: the gradient sums of the ranks.
        fabric: the ranks.
        updates: true if this rank updates a part of a stage.
    """

    def __init__(
        self,
        stages: Sequence[StageSpec],
        schedule: BackwardSchedule,
        access: StageAccess,
        ledger: Ledger,
        gradients: RankGradients,
        *,
        fabric: Fabric,
        updates: Callable[[int], bool],
    ) -> None:
        super().__init__(stages, schedule, access, ledger, gradients)
        self._shared = gradients
        self._fabric = fabric
        count = len(stages) * fabric.local_size
        # By stage and rank: the last step in which the rank has handed over the stage, and measured it. Steps
        # are counted by `RankGradients.step`, so that a step that failed and is repeated counts twice.
        self._handed_over = Board(fabric, count)
        self._measured = Board(fabric, count)
        # By rank: the uses that its backwards have ended, those of all steps counted together. A rank for
        # which no other rank must wait counts as if it had ended its backward.
        self._ended = Board(fabric, fabric.local_size)
        self._updates = updates

    def _slots(self, stage: int) -> range:
        first = stage * self._fabric.local_size
        return range(first, first + self._fabric.local_size)

    def _post(self, board: Board, stage: int) -> None:
        board.post(self._slots(stage)[self._fabric.local_rank], self._shared.step)

    def _have_all(self, board: Board, stage: int) -> bool:
        return all(board.read(slot) == self._shared.step for slot in self._slots(stage))

    def _has_begun(self, step: RunningStep, error: BaseException) -> bool:
        if isinstance(error, NonFiniteError):
            # All ranks raise this error when their backwards have ended, or about a stage that all have
            # handed over. So the result is equal on all ranks.
            return any(self._have_all(self._handed_over, stage) for stage in range(len(self._stages)))
        return bool(step.handed_over)  # the other ranks may still hand over these stages

    def _check(self, step: RunningStep, key: ParamKey) -> None:
        pass  # other ranks may still add to the sum

    def _hand_over(self, step: RunningStep, stage: int) -> None:
        step.complete.discard(stage)
        # A second gradient is added at the end of the backward.
        if not self._shared.sums.has_second(stage) and self._let_go(step, stage):
            step.waiting.append(stage)
            self._post(self._handed_over, stage)

    def _meet(self, step: RunningStep) -> None:
        self._note_pace(len(self._schedule.uses) - step.reached)
        self._look(step)
        if not self._is_in_pace():
            # A rank that is behind may wait for updates of stages that the forward of this rank has skipped.
            self._access.catch_up_all()
        while not self._is_in_pace():
            self._fabric.wait_until(
                lambda: self._is_in_pace() or any(map(self._is_due, step.waiting)),
                "the backwards of all ranks",
            )
            self._look(step)

    def let_others_pass(self) -> None:
        if self._step is not None:
            self._note_pace(len(self._schedule.uses))

    def _note_pace(self, ended: int) -> None:
        earlier = (self._shared.step - 1) * len(self._schedule.uses)
        self._ended.post(self._fabric.local_rank, earlier + ended)

    def _is_in_pace(self) -> bool:
        ended = [self._ended.read(rank) for rank in range(self._fabric.local_size)]
        return ended[self._fabric.local_rank] - min(ended) <= MOST_AHEAD

    def _look(self, step: RunningStep) -> None:
        """Measure the sums of stages that all ranks have handed over, and update those that are measured."""
        for stage in [stage for stage in step.waiting if self._is_due(stage)]:
            if not self._is_measured_here(stage):
                self._shared.sums.measure(self._shared.sums.keys_of_stage[stage])
                self._post(self._measured, stage)
            if self._have_all(self._measured, stage):
                step.waiting.remove(stage)
                self._take(step, stage)
        self._queue.run_here()

    def _is_due(self, stage: int) -> bool:
        """True if this rank can measure the sums of a stage now, or update it."""
        if self._is_measured_here(stage):
            return self._have_all(self._measured, stage)
        return self._have_all(self._handed_over, stage) and self._shared.sums.are_whole(stage)

    def _is_measured_here(self, stage: int) -> bool:
        return self._measured.read(self._slots(stage)[self._fabric.local_rank]) == self._shared.step

    def _take(self, step: RunningStep, stage: int) -> None:
        norms = {key: self._shared.sums.norm(key) for key in self._shared.sums.keys_of_stage[stage]}
        for key, norm in norms.items():
            self._shared.status.measure(key, norm)
        self._refuse_non_finite(step, self._shared.status.norm(norms))
        self._shared.taken_early.update(norms)
        self._shared.commit(norms, {stage} if self._updates(stage) else ())
        self._record(step, norms)
