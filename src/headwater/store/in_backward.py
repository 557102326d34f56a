"""Updates that are applied during the backward of a step, instead of when their stages are fetched next."""

from __future__ import annotations

import abc
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

import torch

from headwater.core.errors import ConfigError, HeadwaterError, StoreError, StreamError
from headwater.core.stage import ParamKey, StageSpec
from headwater.core.worker_pools import update_pool
from headwater.store.gradients.status import NO_NORMS
from headwater.store.layout import MOST_UNFINISHED
from headwater.store.locks import RESUME
from headwater.store.update import NOT_APPLIED, Part, Update, non_finite_error

if TYPE_CHECKING:
    from headwater.store.gradients.port import GradientSink
    from headwater.store.ledger import Ledger
    from headwater.store.stages import StageAccess


@dataclasses.dataclass(frozen=True)
class BackwardSchedule:
    """The order in which a backward needs the stages, and the thread that updates each stage.

    Attributes:
        uses: stage of each use in a forward, in order; a backward uses them in reverse.
        computing: stages that the thread of the backward updates, because it computes on the same cores.
        left_out: stages that are updated when they are fetched next.
        on_cpu: true if the CPU computes.
    """

    uses: Sequence[int]
    computing: Collection[int] = ()
    left_out: Collection[int] = ()
    on_cpu: bool = False


@dataclasses.dataclass
class RunningStep:
    """The updates of a step that runs.

    Attributes:
        update: the step.
        number: the number of the commit that the step will make.
        complete: stages that have all gradients, and that the backward may still need. Those that are left in
            this set at the end of the backward are updated after the commit.
        excluded: stages that must not be updated before the commit, because the backward uses them again.
        handed_over: stages that the backward needs no more. With one rank their update has begun.
        waiting: with several ranks, the stages in `handed_over` whose update has not begun.
        norms: the norms of the gradients of the stages in `handed_over`.
        is_over: true when the step has failed: no stage may be handed over any more.
        reached: the index of the use that the backward has reached. Only the backward's thread uses it.
        received: by stage, the parameters that have a gradient of the last micro-batch.
    """

    update: Update
    number: int
    reached: int
    received: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    complete: set[int] = dataclasses.field(default_factory=set)
    excluded: set[int] = dataclasses.field(default_factory=set)
    handed_over: set[int] = dataclasses.field(default_factory=set)
    waiting: list[int] = dataclasses.field(default_factory=list)
    norms: dict[ParamKey, torch.Tensor] = dataclasses.field(default_factory=dict)
    is_over: bool = False


@final
class _UpdateQueue:
    """The updates of a step that are recorded and not applied, those of the backward's thread and of another.

    Args:
        access: applies updates.
        schedule: says which thread updates each stage.
    """

    def __init__(self, access: StageAccess, schedule: BackwardSchedule) -> None:
        self._access = access
        self._computing = schedule.computing
        self._here: deque[int] = deque()  # stages that the thread of the backward will update
        self._running: deque[Future[None]] = deque()
        self._is_open = False
        self._lock = threading.Lock()
        self._thread = update_pool("headwater-update", on_cpu=schedule.on_cpu)

    def open(self) -> None:
        """Begin a step. Forget the updates of the previous one.

        If one of them has failed, the next use of its stage repeats it or raises. If it stayed here, `wait`
        would raise its error in the middle of the new step.
        """
        self._here.clear()
        self._running.clear()
        self._is_open = True

    def cancel(self) -> None:
        """Drop the updates that have not begun. No other update begins before the next step."""
        with self._lock:
            self._is_open = False
            for running in self._running:
                running.cancel()
            self._running.clear()

    def begin(self, stage: int) -> None:
        """Begin a recorded update on the thread of updates, or leave it for the thread of the backward."""
        if stage in self._computing:
            self._here.append(stage)
            return
        with self._lock:
            if self._is_open:
                self._running.append(self._thread.submit(self._access.catch_up, stage))

    def run_here(self) -> None:
        """Apply the updates of the calling thread, which is that of the backward."""
        while self._here:
            self._access.catch_up(self._here.popleft())

    def wait(self) -> None:
        """Block while too many updates of the other thread are unfinished. Raise the error of an update."""
        while len(self._running) > MOST_UNFINISHED or (self._running and self._running[0].done()):
            # The entry is removed after the wait: if the wait is interrupted, it still counts.
            self._running[0].result()
            self._running.popleft()

    def close(self) -> None:
        """End the thread. Updates that have not begun are dropped."""
        self._thread.shutdown(wait=True, cancel_futures=True)


class BackwardUpdates(abc.ABC):
    """Updates each stage in the last backward of a step, as soon as the backward does not need it any more.

    A stage is handed over to its update under two conditions. All its trained parameters have a gradient. And
    a gradient of another stage has arrived, all of whose uses come earlier in the forward. Autograd runs in
    the reverse order of the forward, so the backward no longer needs the complete stage. `note_use` detects a
    backward in another order. Then the stage is updated after the commit, or the step fails.

    The commit takes the stages that are left at the end of the backward. Those that have all gradients are
    updated at once, and the others when they are fetched next.

    Gradients arrive on the thread that adds them to their sums. This may not be the thread of the backward.

    Attributes:
        on_hand_over: called with each stage before its update begins.

    Args:
        stages: the stages.
        schedule: when stages are used, and which thread updates them.
        access: locks stages and applies updates.
        ledger: the commits.
        gradients: the gradient sums.
    """

    def __init__(
        self,
        stages: Sequence[StageSpec],
        schedule: BackwardSchedule,
        access: StageAccess,
        ledger: Ledger,
        gradients: GradientSink,
    ) -> None:
        self._stages = stages
        self._schedule = schedule
        self._access = access
        self._ledger = ledger
        self._gradients = gradients
        self.on_hand_over: Callable[[int], None] = lambda stage: None
        self._first = {stage: use for use, stage in reversed(list(enumerate(schedule.uses)))}
        self._last = _last_uses(stages, schedule.uses)
        self._num_trained = [sum(param.requires_grad for param in stage.params) for stage in stages]
        self._step: RunningStep | None = None
        self._lock = threading.Lock()
        self._queue = _UpdateQueue(access, schedule)

    @property
    def norms(self) -> Mapping[ParamKey, torch.Tensor]:
        """The norms of the gradients that updates of the running step have taken."""
        return NO_NORMS if self._step is None else self._step.norms

    @contextmanager
    def step(self, update: Update) -> Iterator[None]:
        """Enter a context in which one step runs, up to its commit.

        If the context raises after a stage was handed over, every later use of the store raises too.

        Raises:
            ConfigError: if the step needs all gradients before an update.
        """
        _refuse_global(update)
        self._queue.open()
        self._step = step = RunningStep(
            update, self._ledger.num_commits + 1, reached=len(self._schedule.uses)
        )
        try:
            yield
        except BaseException as error:
            with self._lock:
                # The thread that adds gradients may be about to hand over the first stage.
                step.is_over = True
            if not self._has_begun(step, error):
                raise
            raised = self._give_up(step, error)
            if raised is error:
                raise
            raise raised from error
        finally:
            # After an error too: a rank that waits for this one would not add the gradients for which the
            # additions of this rank wait.
            self.let_others_pass()
            self._step = None

    @abc.abstractmethod
    def _has_begun(self, step: RunningStep, error: BaseException) -> bool:
        """True if a stage may have applied a step that has failed with this error."""

    def _give_up(self, step: RunningStep, error: BaseException) -> BaseException:
        """Mark the step as lost, and return the error to raise instead of `error`."""
        number, updated = step.update.step, _updated(step, len(self._stages))
        reason = error.what if isinstance(error, HeadwaterError) else repr(error)
        # This is first, because the thread of updates checks it. A checkpoint must not save such a step.
        self._access.locks.lose(f"step {number} has failed after {updated} were updated: {reason}")
        self._queue.cancel()
        remedy = (
            f"{RESUME}; {updated} have applied step {number}, because of updates: in_backward. With updates: "
            "on_fetch such a step is undone"
        )
        if isinstance(error, HeadwaterError):
            advice = (error.remedy or "").removesuffix(NOT_APPLIED)
            return type(error)(
                error.what, where=error.where, remedy=f"{remedy}; {advice}" if advice else remedy
            )
        error.add_note(remedy)
        return error

    # the thread that adds gradients

    def refuse_late(self, key: ParamKey) -> None:
        """Raise `StreamError` if a gradient comes too late, because its stage is handed over."""
        step, (stage, param) = self._step, key
        if step is not None and stage in step.handed_over:
            raise self._out_of_order(f"a gradient of {self._stages[stage].params[param].name!r} arrived")

    def arrived(self, key: ParamKey) -> None:
        """Record that a parameter has its gradient sum of the whole step.

        Raises:
            NonFiniteError: if the sum is not finite.
        """
        step, (stage, param) = self._step, key
        if step is None:
            return
        self._check(step, key)
        received = step.received.setdefault(stage, set())
        received.add(param)
        if len(received) == self._num_trained[stage] and stage not in self._schedule.left_out:
            step.complete.add(stage)
        for other in sorted(step.complete, reverse=True):
            if self._first.get(other, -1) > self._last.get(stage, len(self._schedule.uses)):
                self._hand_over(step, other)

    @abc.abstractmethod
    def _check(self, step: RunningStep, key: ParamKey) -> None:
        """Raise `NonFiniteError` if the gradient that has arrived is known not to be finite."""

    @final
    def _refuse_non_finite(self, step: RunningStep, norm: torch.Tensor) -> None:
        if not bool(norm.isfinite()):
            raise non_finite_error(self._stages, self._gradients.status.first_bad, step.update)

    @abc.abstractmethod
    def _hand_over(self, step: RunningStep, stage: int) -> None:
        """Hand over a complete stage, or leave it for the commit if the backward uses it again."""

    @final
    def _let_go(self, step: RunningStep, stage: int) -> bool:
        """Record that the backward needs a stage no more, unless it does or the step has failed."""
        with self._lock:
            if step.is_over or stage in step.excluded:
                return False
            step.handed_over.add(stage)
        self.on_hand_over(stage)
        return True

    @final
    def _record(self, step: RunningStep, norms: Mapping[ParamKey, torch.Tensor]) -> None:
        """Record the update of a stage whose gradients are committed, and begin it.

        Gradients are committed before this call. From here on another thread may apply the update, and takes
        the gradients.

        Args:
            step: the step.
            norms: the norm of each gradient of the stage.
        """
        step.norms.update(norms)
        (stage,) = {stage for stage, _ in norms}
        self._access.commit_ahead(stage, {param: Part(step.number, step.update, None) for _, param in norms})
        self._queue.begin(stage)

    # the thread of the backward

    @final
    def advance(self, stage: int, *, last: bool) -> None:
        """Continue after a gradient was sent. Block while too many stages wait for their update.

        Args:
            stage: the gradient's stage.
            last: true if this is the step's last micro-batch.

        Raises:
            HeadwaterError: the error of an update.
        """
        if self._step is None or not last:
            return
        self._step.reached = min(self._step.reached, self._last.get(stage, len(self._schedule.uses)))
        self._meet(self._step)
        self._queue.run_here()
        self._queue.wait()

    @abc.abstractmethod
    def _meet(self, step: RunningStep) -> None:
        """Begin updates that all ranks can begin now, and wait for ranks that are far behind."""

    @abc.abstractmethod
    def let_others_pass(self) -> None:
        """Record that other ranks need not wait for this one: it has sent all gradients, or waits itself."""

    @final
    def note_use(self, stage: int) -> None:
        """Record that the backward needs the weights of a stage.

        Raises:
            StreamError: if the stage is handed over.
        """
        step = self._step
        if step is None or self._first.get(stage, -1) <= step.reached:
            return
        with self._lock:
            step.excluded.add(stage)
            is_late = stage in step.handed_over
        if is_late:
            raise self._out_of_order(f"the backward needs the weights of stage {self._stages[stage].name!r}")

    def _out_of_order(self, what: str) -> StreamError:
        return StreamError(
            f"{what} after the stage's update in the same step",
            remedy="write updates: on_fetch; the backward of this model is not the reverse of its forward",
        )

    # between backwards

    @final
    def require_no_updates(self) -> None:
        """Raise `StoreError` if stages have applied a step that is not committed yet."""
        step = self._step
        if step is not None and step.handed_over and step.number > self._ledger.num_commits:
            updated = _updated(step, len(self._stages))
            raise StoreError(
                f"{updated} have applied step {step.update.step}, which is not committed yet",
                remedy="begin the checkpoint between two steps",
            )

    @final
    def committed(self) -> None:
        """Begin the updates of stages that were complete at the end of the backward, after their commit."""
        step = self._step
        if step is not None:
            for stage in sorted([*step.complete, *step.waiting], reverse=True):
                self._queue.begin(stage)
            self._queue.run_here()

    @final
    def close(self) -> None:
        """End the thread. Updates that have not begun are dropped."""
        self._queue.close()


@final
class LocalBackwardUpdates(BackwardUpdates):
    """Updates in the backward of a run with one rank."""

    def _has_begun(self, step: RunningStep, error: BaseException) -> bool:
        return bool(step.handed_over)

    def _check(self, step: RunningStep, key: ParamKey) -> None:
        # A check in the commit would be too late: no stage could be handed over until then, and memory for
        # the gradients of all stages may be missing.
        self._refuse_non_finite(step, self._gradients.status.norms[key])

    def _hand_over(self, step: RunningStep, stage: int) -> None:
        step.complete.discard(stage)
        status = self._gradients.status
        # A user's hook may have dropped or changed a gradient since it arrived: `norm` measures it again.
        keys = [(stage, p) for p in sorted(step.received[stage]) if (stage, p) in status.present]
        if not keys:
            return
        self._refuse_non_finite(step, self._gradients.norm(keys))
        if self._let_go(step, stage):
            norms = {key: status.norms[key] for key in keys}
            self._gradients.commit(keys, {stage})
            self._record(step, norms)

    def _meet(self, step: RunningStep) -> None:
        pass

    def let_others_pass(self) -> None:
        pass


def _updated(step: RunningStep, num_stages: int) -> str:
    return f"{len(step.handed_over)} of {num_stages} stages"


def _last_uses(stages: Sequence[StageSpec], uses: Sequence[int]) -> dict[int, int]:
    """Return stage -> its last use in a forward."""
    last = {stage: use for use, stage in enumerate(uses)}
    for stage in stages:
        if stage.part_of is not None and stage.index in last:
            # The enclosing stage has the biases of its parts. When a part's weight and bias are read, only
            # the use of the part is recorded.
            last[stage.part_of] = max(last.get(stage.part_of, -1), last[stage.index])
    return last


def _refuse_global(update: Update) -> None:
    """Raise `ConfigError` if an update needs all gradients of a step before the first stage is updated."""
    wanted = {
        "max_norm": update.max_norm is not None,
        "loss_scale": update.loss_scale != 1.0,
        "skip_non_finite": update.skip_non_finite,
    }
    for name, is_wanted in wanted.items():
        if is_wanted:
            raise ConfigError(
                f"expected a step without {name} for updates in backward, got {name} {getattr(update, name)}",
                where="updates",
                remedy="write updates: on_fetch; clipping by norm, and steps that may be skipped, need all "
                "gradients before the first update",
            )
