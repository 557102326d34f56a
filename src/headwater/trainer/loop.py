"""The training loop: runs the steps, evaluations and checkpoints of a run."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

from headwater.core.batches import num_samples
from headwater.core.busy import BusyTimes, busy_times, fetch_bound
from headwater.core.errors import HeadwaterError, NonFiniteError
from headwater.core.recorder import INPUT, RECORDER
from headwater.core.warn_once import warn_once
from headwater.plan.machine import resident_bytes
from headwater.plan.types import Plan
from headwater.sparsity.sparsifier import Sparsifier
from headwater.store.update import Update
from headwater.stream.engine import Engine
from headwater.stream.step import StepReport
from headwater.trainer.averages import MovingAverages
from headwater.trainer.batches import equal_part, num_tokens
from headwater.trainer.callback import Callback, FitStart, StepEnd, ValidateEnd
from headwater.trainer.callback_runner import CallbackRunner
from headwater.trainer.checkpoint import CheckpointManager, persistent_buffers
from headwater.trainer.evaluate import evaluate
from headwater.trainer.interrupt import Interrupt, shielded
from headwater.trainer.job import Batch, Job
from headwater.trainer.options import options_by_name
from headwater.trainer.sparse import SkippedWeights, start_sparse
from headwater.trainer.state import RunState
from headwater.trainer.waits import log_if_long

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Step:
    """The input of a training step: its batch, divided into micro-batches, and the update to make.

    Attributes:
        start_ns: clock at which the wait for the batch began.
        batch: the batch; `None` on a rank that does not compute.
        parts: its micro-batches.
        update: the update of the weights.
        loss_weights: see `Trainer._loss_weights`.
    """

    start_ns: int
    batch: Batch
    parts: Sequence[Batch]
    update: Update
    loss_weights: list[float] | None


class Trainer:
    """Trains a run from its current step to its last one.

    Attributes:
        state: current state of the run, without the masks of sparse training.
        validation: results of the last evaluation in this process, one for each data set.
        end_step: last step of the run.
        leads: true on rank 0, which writes checkpoints and logs.

    Args:
        engine: holds the weights of the current step.
        job: the run.
        state: current state of the run; sets the position in the training data.
        checkpoints: writes checkpoints.
        callbacks: called with the events of the run, in this order.
        saved_step: step of a checkpoint that need not be written again.
        sparsifier: the masks of sparse training; `None` if no weight is masked.
    """

    def __init__(
        self,
        engine: Engine,
        job: Job,
        state: RunState,
        *,
        checkpoints: CheckpointManager,
        callbacks: Sequence[Callback],
        saved_step: int | None = None,
        sparsifier: Sparsifier | None = None,
    ) -> None:
        self.state = state
        self.validation: list[ValidateEnd] = []
        self._engine = engine
        self.leads = engine.fabric.rank == 0
        self._job = job
        self._checkpoints = checkpoints
        self._callbacks = CallbackRunner(callbacks)
        self._saved_step = saved_step
        if state.data is not None:
            job.train.load_state_dict(state.data)
        self.end_step = job.end_step(state.step)
        self._options = options_by_name(job)
        self._averages = MovingAverages(engine.store, job.trainable.averages)
        self._sparse = None if sparsifier is None else start_sparse(engine, sparsifier)
        self._skipped: Callable[[int], AbstractContextManager[None]] = lambda step: nullcontext()
        if sparsifier is not None and engine.plan.device == "cpu" and engine.plan.kernels == "fast":
            self._skipped = SkippedWeights(engine.model, sparsifier).skipped

    @property
    def plan(self) -> Plan:
        """The plan of the run's steps."""
        return self._engine.plan

    def fit(self, interrupt: Interrupt) -> None:
        """Train until the last step, or until the end of the step in which `interrupt` requests a stop.

        A checkpoint is written at the end, also if a step fails because it is not finite, or if a callback
        fails between steps.

        Raises:
            HeadwaterError: the error of a step, or of the first callback that failed.
        """
        try:
            self._callbacks.start(self._start_event())
            batches = shielded(self._job.train) if self._engine.fabric.computes else itertools.repeat(None)
            first_step_notice: AbstractContextManager[None] = log_if_long(
                _first_step(self._engine.plan), self._engine.fabric
            )
            while self._between_steps(interrupt):
                with first_step_notice:
                    step = self._next_step(batches)
                    with self._skipped(step.update.step):
                        report = self._engine.train_step(
                            step.parts, step.update, self._before_commit, step.loss_weights
                        )
                first_step_notice = nullcontext()
                self._after_step(step, report)
            if self._callbacks.failure is not None:
                raise self._callbacks.failure
            self._wait_for_checkpoint()  # inside `try`, so that callbacks are called with its error
        except BaseException as error:
            try:
                with ExitStack() as last:  # all of these are called, even if one fails
                    last.callback(self._end)
                    last.enter_context(self._callbacks.reporting(error))
                    # A step that is not finite is undone, so the weights can be saved, unless some stages
                    # have applied it (`updates: in_backward`). Other errors may leave half a step.
                    if (
                        isinstance(error, NonFiniteError)
                        and not self._engine.store.access.locks.has_lost_step
                    ):
                        self._save()
            except HeadwaterError as later:  # log it, because the first error is raised
                logger.warning("%s", later)
            raise
        self._end()

    def _start_event(self) -> FitStart:
        engine = self._engine
        return FitStart(
            self.state.step, self.end_step, engine.plan, engine.model, engine, self._callbacks.callbacks
        )

    def _end(self) -> None:
        """Wait until the last checkpoint is written, then end all callbacks, even if one of them fails."""
        with self._callbacks.ending():
            self._wait_for_checkpoint()

    def _wait_for_checkpoint(self) -> None:
        with log_if_long("writing the checkpoint", self._engine.fabric):
            self._checkpoints.wait()

    def _between_steps(self, interrupt: Interrupt) -> bool:
        """Evaluate and save if this is due at the present step. Return false if the run should stop."""
        self._checkpoints.check()
        # An evaluation is due on all ranks or on none, so all ranks take part in `_asked_to_stop`.
        if self._validation_is_due() and not self._asked_to_stop(interrupt):
            with log_if_long("evaluating", self._engine.fabric):
                self._validate(interrupt)
        stop = self._asked_to_stop(interrupt) or self.state.step >= self.end_step
        if stop or self._checkpoint_is_due():
            self._save()
        return not stop

    def _asked_to_stop(self, interrupt: Interrupt) -> bool:
        """True if any rank was asked to stop, or a callback failed. All ranks return the same answer."""
        asked = interrupt.requested or self._callbacks.failure is not None
        agreed = any(self._engine.fabric.gather(float(asked)))
        interrupt.requested |= agreed
        return agreed

    # training

    def _next_step(self, batches: Iterator[Batch]) -> _Step:
        """Return the next step: its update, and its batch in micro-batches."""
        start_ns = time.perf_counter_ns()
        with RECORDER.span(INPUT):
            batch = next(batches)
        count = self._engine.plan.num_micro_batches
        parts: Sequence[Batch] = [None] * count
        if batch is not None:
            parts = list(self._job.trainable.micro_batches(batch, equal_part(batch, count)))
        return _Step(start_ns, batch, parts, self._update(), self._loss_weights(parts))

    def _after_step(self, step: _Step, report: StepReport) -> None:
        """Update the state of the run after a step, and call the callbacks."""
        batch, update = step.batch, step.update
        if report.loss == 0.0 and batch is not None and self._job.trainable.weight(batch) == 0:
            warn_once(
                logger,
                "no position of a batch counts in the loss, so the step has trained on nothing; check the "
                "attention_mask or the labels of the data",
            )
        # A skipped step changes no weights, so averages must not move either.
        if report.applied:
            self._averages.after_update(update.step)
        self.state = dataclasses.replace(
            self.state,
            step=update.step,
            loss_scale=self.state.loss_scale.after(applied=report.applied),
            data=self._job.train.state_dict(),
        )
        fabric = self._engine.fabric
        times = self._times(step.start_ns)
        # Ranks without callbacks need this too, because all ranks take part in the exchange of `tokens`.
        event = StepEnd(
            step=update.step,
            loss=report.loss,
            learning_rate=update.options["lr"],
            gradient_norm=report.gradient_norm,
            applied=report.applied,
            loss_scale=update.loss_scale,
            tokens=int(sum(fabric.gather(num_tokens(batch)))),
            step_s=1e-9 * (time.perf_counter_ns() - step.start_ns),
            bytes_in=report.statistics.bytes_in,
            bytes_out=report.statistics.bytes_out,
            hit_rate=report.statistics.hit_rate,
            wait_s=report.statistics.wait_s,
            memory_bytes=resident_bytes(),
            samples=0 if batch is None else fabric.num_csx * num_samples(batch),
            busy_s=times.busy_s,
            bound_s=times.bound_s,
        )
        metrics: dict[str, float] = {}
        self._callbacks.call_each(lambda callback: metrics.update(callback.measure(event)))
        measured = dataclasses.replace(event, metrics=metrics)
        self._callbacks.call_each(lambda callback: callback.on_step_end(measured))

    def _times(self, begin: int) -> BusyTimes:
        """Return the seconds since `begin` by kind of work."""
        end, bound = time.perf_counter_ns(), fetch_bound(self._engine.plan.device)
        return busy_times(RECORDER.events(begin, end), begin, end, RECORDER.lane().thread, bound)

    def _loss_weights(self, parts: Sequence[Batch]) -> list[float] | None:
        """Return the weight of each micro-batch in the loss of the batch; `None` if all are equal."""
        fabric = self._engine.fabric
        if len(parts) * fabric.size == 1:
            return None
        weights = [0.0 if part is None else self._job.trainable.weight(part) for part in parts]
        total = sum(fabric.gather(sum(weights)))
        if total == 0 or all(weight * len(parts) * fabric.num_csx == total for weight in weights):
            return None
        return [weight / total for weight in weights]

    def _before_commit(self, update: Update) -> None:
        if self._sparse is not None:
            self._sparse.before_update(update.step)

    def _update(self) -> Update:
        """Return the update of the next step. Steps count from 1, schedules from 0."""
        return Update(
            step=self.state.step + 1,
            options={"lr": self._job.init.schedule.value(self.state.step)},
            max_norm=self._job.init.precision.max_gradient_norm,
            max_value=self._job.init.precision.max_gradient_value,
            loss_scale=self.state.loss_scale.value,
            skip_non_finite=self.state.loss_scale.may_skip,
            by_name=None if self._options is None else self._options(self.state.step),
        )

    # evaluation

    def _validation_is_due(self) -> bool:
        step, interval = self.state.step, self._job.init.loop.eval_interval(self.end_step)
        if not self._job.evaluations or not interval or step in (0, self.state.validated_step):
            return False
        return step % interval == 0 or step == self.end_step

    def _validate(self, interrupt: Interrupt) -> None:
        events = []
        norm = weight_norm(self._engine) if self._job.init.compute_norm else None
        for index, loader in enumerate(self._job.evaluations):
            found = evaluate(
                self._engine,
                self._job.trainable,
                shielded(loader) if self._engine.fabric.computes else (),
                max_batches=self._job.init.loop.eval_steps,
                stop=lambda: interrupt.requested,
            )
            if found is None:
                return
            events.append(ValidateEnd(self.state.step, index, found.loss, found.batches, norm, found.metrics))
        # An evaluation that was stopped is not recorded, so it is made again when the run continues.
        self.validation = events
        self.state = dataclasses.replace(self.state, validated_step=self.state.step)
        for event in events:
            self._callbacks.call_each(lambda each, event=event: each.on_validate_end(event))  # type: ignore[misc]

    # checkpoints

    def _checkpoint_is_due(self) -> bool:
        if self.state.step == 0:
            return self._job.init.checkpoint.save_initial_checkpoint
        every = self._job.init.checkpoint.steps
        return every is not None and every > 0 and self.state.step % every == 0

    def _save(self) -> None:
        if self.state.step == self._saved_step:
            return
        if self._engine.fabric.size > 1:
            self._checkpoints.wait()
            self._engine.store.flush()
            # Rank 0 saves the scalars of all parameters, and other ranks have updated some of them.
            self._engine.store.scalars.share()
        if not self.leads:
            self._checkpoints.save_elsewhere(self._engine.store)
            self._saved_step = self.state.step
            return
        # The masks are not kept in `self.state`, where an older copy would stay in memory.
        masks = self.state.masks if self._sparse is None else self._sparse.state_dict()
        path = self._checkpoints.save(
            self._engine.store,
            self.state.step,
            dataclasses.replace(self.state, masks=masks).to_dict(),
            buffers=persistent_buffers(self._engine.model),
        )
        self._saved_step = self.state.step
        self._callbacks.call_each(lambda callback: callback.on_checkpoint(self.state.step, path))


def _first_step(plan: Plan) -> str:
    """Return the work until the end of the first step, in words."""
    return "computing the first step" + (", which compiles the blocks" if plan.blocks.compiled else "")


def weight_norm(engine: Engine) -> float:
    """Return the 2-norm of all parameters together. All ranks must call this."""
    store, square = engine.store, 0.0
    store.flush()
    if engine.fabric.local_rank == 0:  # one rank for each host: a host keeps a part of the masters
        for stage in store.stages:
            for piece in store.parameters.read(stage.index, states=()):
                square += float(torch.linalg.vector_norm(piece.master, dtype=torch.float64)) ** 2
    return math.sqrt(sum(engine.fabric.gather(square)))
