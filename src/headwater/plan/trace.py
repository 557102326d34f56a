"""The dry run: one micro-batch through the model on fake tensors, without memory or data.

The reads of every weight are recorded operator by operator. So a weight is streamed also to a module that
reads it without owning it.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

from torch import nn

from headwater.core.dry_run import counting_costs
from headwater.core.effects import effects_undone
from headwater.core.loss_function import LossFunction, call_model
from headwater.core.precision import Precision, autocast
from headwater.core.trees import tensors_in
from headwater.core.uncompiled import compiler_off
from headwater.core.user_functions import functions_in
from headwater.plan.cast_reads import CastReads
from headwater.plan.flex_attention import flex_attention_of_gpu
from headwater.plan.gpu_casts import casts_of_gpu
from headwater.plan.known_traces import known_or_made
from headwater.plan.partition import Partition, find_stages
from headwater.plan.repeats import Repeats
from headwater.plan.step_trace import Trace
from headwater.plan.tensors import FakeTensors, Tensors, have_values, with_real_tensors
from headwater.plan.trace_recorder import Observer, Recorder


def trace_step(
    model: nn.Module,
    batch: Any,
    precision: Precision | None = None,
    *,
    loss_function: LossFunction = call_model,
    partition: Partition | None = None,
    observer: Observer | None = None,
    inference: bool = False,
    device: str = "cpu",
) -> Trace:
    """Record the order in which a step uses stages, and the costs of each stage.

    Args:
        model: the model; parameters and buffers may be on the meta device. The model is not changed.
        batch: tensors (real, fake or meta) in any nesting. The first dimension of the first tensor is the
            number of samples. The dry run uses the values of real integer and bool tensors, and only the
            shapes of all other tensors.
        precision: precision of the run; fp32 if not given.
        loss_function: returns the scalar loss.
        partition: the stages; found automatically if not given.
        observer: called with every operator.
        inference: run only the forward, without gradients; the loss may then be any tensor.
        device: `cpu` or `cuda`, whose autocast decides the dtypes; see [Note: casts of a GPU].

    Returns:
        The trace.

    Raises:
        StreamError: if a forward returns a generator, or reads no weights in the thread that calls it.
    """
    precision = precision or Precision()
    partition = partition or find_stages(model, precision)
    dry_run = _DryRun(
        model,
        batch,
        precision,
        loss_function,
        partition,
        observer,
        inference,
        device,
        only_fake=observer is not None,
    )
    if observer is not None:
        return dry_run.trace()
    # torch's strided nested tensors have no shape.
    shapes = tuple(None if tensor.is_nested else tensor.shape for tensor in tensors_in(batch))
    return known_or_made((partition, precision, shapes, model.training, inference, device), dry_run.trace)


def widen_uncast(
    partition: Partition,
    model: nn.Module,
    batch: Any,
    precision: Precision,
    *,
    loss_function: LossFunction,
    inference: bool = False,
    device: str = "cpu",
) -> Partition:
    """Return the stages with the dtypes of weights and gradients that a forward under autocast needs.

    See [Note: weights in fp32 under autocast] in `plan/cast_reads.py`.

    Args:
        partition: the stages.
        model: see `trace_step`, as for all following arguments.
        batch: the batch of the forward.
        precision: the precision of autocast; outside of autocast fp32, which changes nothing.
        loss_function: returns the scalar loss.
        inference: run only the forward, without gradients.
        device: `cpu` or `cuda`, whose autocast decides the casts.
    """
    if not precision.mixed:
        return partition
    reads = CastReads(partition, loss_function, precision.wire_dtype)
    _DryRun(
        model, batch, precision, reads.loss, reads.observed, reads.observe, inference, device, only_fake=False
    ).trace()
    return reads.result


@dataclasses.dataclass(frozen=True)
class _DryRun:
    """A dry run of one step; for the other attributes see `trace_step`.

    Attributes:
        only_fake: true if the observer may see only fake tensors, even if the forward needs values.
    """

    model: nn.Module
    batch: Any
    precision: Precision
    loss_function: LossFunction
    partition: Partition
    observer: Observer | None
    inference: bool
    device: str
    only_fake: bool

    def trace(self) -> Trace:
        """Make the dry run and return its trace."""
        may_skip = self.observer is None and not self.inference
        try:
            with counting_costs() if self.observer is None else nullcontext():
                recorder = self._skipping() if may_skip else None
                if recorder is None:
                    recorder = self._run(FakeTensors())
        except Exception:  # fake values can make the user's forward fail in any way
            # The run on real tensors below raises an error of the model itself again.
            if self.only_fake or not have_values(self.model, self.batch):
                raise
            recorder = with_real_tensors(self._run)
        return recorder.trace(_batch_size(self.batch))

    def _skipping(self) -> Recorder | None:
        """Return a dry run that skips repeated stages; `None` if all stages must run."""
        repeats = Repeats(self.model, self.partition)
        try:
            recorder = self._run(FakeTensors(), repeats)
        except Exception:  # skipped stages can make the user's forward fail in any way
            # Then all stages run, and an error of the model itself is raised again there.
            if not repeats.original:
                raise
            return None
        return recorder if repeats.consistent else None

    def _run(self, tensors: Tensors, repeats: Repeats | None = None) -> Recorder:
        """Return the record of a run on some tensors."""
        recorder = Recorder(
            self.model, self.partition, tensors, self.observer, repeats, inference=self.inference
        )
        on_gpu = self.device != "cpu"
        casts = casts_of_gpu() if self.precision.mixed and on_gpu else nullcontext()
        attention = flex_attention_of_gpu() if on_gpu else nullcontext()
        # Outermost: states of random generators are real tensors.
        untouched = effects_undone(self.model, functions_in(self.batch))
        with (
            untouched,
            compiler_off(),
            tensors.active(),
            attention,
            casts,
            autocast(self.precision, "cpu"),
        ):
            recorder.run(self.batch, self.loss_function)
        return recorder


def _batch_size(batch: Any) -> int:
    first = next(iter(tensors_in(batch)), None)
    size = int(first.size(0)) if first is not None and first.dim() else 1
    return max(size, 1)  # a batch without samples is planned as one sample
