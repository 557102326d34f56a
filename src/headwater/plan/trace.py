"""The dry run: one micro-batch through the model on fake tensors, without memory or data.

The reads of every weight are recorded operator by operator. So a weight is streamed also to a module that
reads it without owning it.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import GeneratorType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from headwater.core.dry_run import counting_costs
from headwater.core.effects import effects_undone
from headwater.core.errors import StreamError
from headwater.core.loss_function import LossFunction, call_model
from headwater.core.module_calls import Layer, surround
from headwater.core.precision import Precision, autocast
from headwater.core.trees import tensors_in
from headwater.core.uncompiled import compiler_off
from headwater.plan.alive import memory_key
from headwater.plan.gpu_casts import casts_of_gpu
from headwater.plan.known_traces import known_or_made
from headwater.plan.outside import OwnGraph
from headwater.plan.partition import Partition, Unit, find_stages
from headwater.plan.reads import WeightReads
from headwater.plan.repeats import Call, Repeats
from headwater.plan.stage_costs import StageCosts, operands
from headwater.plan.tensors import FakeTensors, Tensors, have_values, with_real_tensors
from headwater.plan.types import Trace
from headwater.plan.writes import ParameterWrites, changed_by


@dataclasses.dataclass(frozen=True)
class OperatorCall:
    """One call of an operator in the dry run, as it is passed to an observer.

    Attributes:
        func: the operator, an overload of `torch.ops`.
        args: its arguments, tensors and others in any nesting; keyword arguments are last.
        out: its result.
        stage: index of the stage to whose cost it is added.
        flops: floating-point operations; 0 if torch does not count them for this operator.
        backward: true if it belongs to the backward.
    """

    func: Any
    args: tuple[Any, ...]
    out: Any
    stage: int
    flops: int
    backward: bool


Observer = Callable[[OperatorCall], None]
"""Called with every operator of a dry run, in order."""


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
    dry_run = _DryRun(model, batch, precision, loss_function, partition, observer, inference, device)
    if observer is not None:
        return dry_run.trace()
    # torch's strided nested tensors have no shape.
    shapes = tuple(None if tensor.is_nested else tensor.shape for tensor in tensors_in(batch))
    return known_or_made((partition, precision, shapes, model.training, inference, device), dry_run.trace)


@dataclasses.dataclass(frozen=True)
class _DryRun:
    """A dry run of one step; for the attributes see `trace_step`."""

    model: nn.Module
    batch: Any
    precision: Precision
    loss_function: LossFunction
    partition: Partition
    observer: Observer | None
    inference: bool
    device: str

    def trace(self) -> Trace:
        """Make the dry run and return its trace."""
        may_skip = self.observer is None and not self.inference
        try:
            with counting_costs() if self.observer is None else nullcontext():
                recorder = self._skipping() if may_skip else None
                if recorder is None:
                    recorder = self._run(FakeTensors())
        except Exception:
            # Fake values can make the user's forward fail in any way. The run on real tensors below raises
            # an error of the model itself again.
            if self.observer is not None or not have_values(self.model, self.batch):
                raise
            recorder = with_real_tensors(self._run)
        return recorder.trace(_batch_size(self.batch))

    def _skipping(self) -> _Recorder | None:
        """Return a dry run that skips repeated stages; `None` if all stages must run."""
        repeats = Repeats(self.model, self.partition)
        try:
            recorder = self._run(FakeTensors(), repeats)
        except Exception:
            # Skipped stages can make the user's forward fail in any way. Then all stages run, and an error
            # of the model itself is raised again there.
            if not repeats.original:
                raise
            return None
        return recorder if repeats.consistent else None

    def _run(self, tensors: Tensors, repeats: Repeats | None = None) -> _Recorder:
        """Return the record of a run on some tensors."""
        recorder = _Recorder(
            self.model, self.partition, tensors, self.observer, repeats, inference=self.inference
        )
        casts = casts_of_gpu() if self.precision.mixed and self.device != "cpu" else nullcontext()
        untouched = effects_undone(self.model)  # outermost: it reads states of random generators, tensors too
        with untouched, compiler_off(), tensors.active(), casts, autocast(self.precision, "cpu"):
            recorder.run(self.batch, self.loss_function)
        return recorder


class _Step(nn.Module):
    """A module whose forward is a whole training step, so that `functional_call` encloses backward too.

    Backward must be inside the call: a recomputed forward runs there, and must find the same parameters.
    """

    def __init__(self, model: nn.Module, step: Callable[[Any], None]) -> None:
        super().__init__()
        self.model = model
        self.forward = step


def _batch_size(batch: Any) -> int:
    first = next(iter(tensors_in(batch)), None)
    size = int(first.size(0)) if first is not None and first.dim() else 1
    return max(size, 1)  # a batch without samples is planned as one sample


def _check_output(output: object, where: str) -> None:
    """Raise if a forward returned a generator, whose code runs only after the call has returned.

    Raises:
        StreamError: if it returned a generator.
    """
    if isinstance(output, GeneratorType):
        raise StreamError(
            "expected a forward that returns outputs, got a generator, which runs after its weights are gone",
            where=where,
            remedy="return a list, or make the generator outside of the model from calls of its parts",
        )


class _Recorder(TorchDispatchMode):
    """A dispatch mode that records module calls and operators; `trace` returns the result."""

    def __init__(
        self,
        model: nn.Module,
        partition: Partition,
        tensors: Tensors,
        observer: Observer | None,
        repeats: Repeats | None,
        *,
        inference: bool,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._partition = partition
        self._computes_on = tensors
        self._observer = observer
        self._repeats = repeats
        self._inference = inference
        self._unit_of = {
            unit.path: index for index, unit in enumerate(partition.units) if not unit.direct_only
        }
        self._stage_of_memory: dict[int, int] = {}
        self._thread = threading.get_ident()
        self._inputs: list[set[int]] = []  # memory of the inputs of each stage that runs
        self._costs = StageCosts(len(partition.stages), inference=inference)
        self._reads = WeightReads(partition)
        self._writes = ParameterWrites({}, self._reads.running)

    def run(self, batch: Any, loss_function: LossFunction) -> None:
        """Run one step and record it."""
        state = self._computes_on.state(self._model, self._partition)
        for stage in self._partition.stages:
            for param in stage.params:
                self._stage_of_memory[memory_key(state[param.name])] = stage.index
        params = {param.name: state[param.name] for stage in self._partition.stages for param in stage.params}
        self._writes = ParameterWrites(params, self._reads.running)
        self._costs.leave_out(params.values(), state.values())
        # Just before the forward: all nodes that autograd has recorded so far come from outside.
        graph = OwnGraph(state.values())
        torch.func.functional_call(
            _Step(self._model, lambda batch: self._step(batch, loss_function, graph)),
            {f"model.{name}": tensor for name, tensor in state.items()},
            (self._computes_on.batch(batch),),
        )

    def _step(self, batch: Any, loss_function: LossFunction, graph: OwnGraph) -> None:
        with self._recording(), torch.set_grad_enabled(not self._inference):
            loss = loss_function(self._model, batch)
        if not self._inference:
            with self._recording_backward():
                graph.backward(loss)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Inside the context, record the module calls and operators of a forward."""
        with ExitStack() as stack:
            for path, module in self._model.named_modules():
                # Layers enclose hooks, so a hook that reads a weight is recorded with its module.
                stack.callback(surround(module, self._around(path)))
            stack.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
            stack.enter_context(self._writes)
            stack.enter_context(self)
            yield

    @contextmanager
    def _recording_backward(self) -> Iterator[None]:
        """Inside the context, record the operators of a backward, which runs outside of autocast."""
        self._costs.in_backward = True
        with ExitStack() as stack:
            if self._repeats is not None:
                for module in self._model.modules():
                    stack.callback(surround(module, self._recomputed))
            stack.enter_context(self)
            stack.enter_context(torch.autocast("cpu", enabled=False))
            yield

    def _recomputed(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module that backward calls again, as a checkpoint does: nothing may have been skipped."""
        # Only modules count: a layer's own backward may compute a function again, with gradients, and the
        # costs of this are among those that a skipped layer takes over.
        assert self._repeats is not None, "only a dry run that skips stages asks for this"
        self._repeats.refuse()
        return call(*args, **kwargs)

    def _around(self, path: str) -> Layer:
        def layer(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if threading.get_ident() != self._thread:
                return call(*args, **kwargs)  # two threads would mix up the modules that run
            stage = self._unit_of.get(path)
            if stage is None or self._reads.running or self._repeats is None:
                return self._run(path, call, args, kwargs)
            inputs, structure = tree_flatten((args, kwargs))
            # Other hooks, as of a checkpoint, save a skipped call otherwise than the call itself.
            may_skip = torch._C._autograd._top_saved_tensors_default_hooks(False)[0] == self._pack
            repeated = self._repeats.call_like(stage, inputs, structure, may_skip=may_skip)
            if repeated is not None:
                return self._repeat(self._repeats.members(stage), repeated, inputs)
            num_uses = len(self._reads.uses)
            output = self._run(path, call, args, kwargs)
            members = self._repeats.members(stage)
            # A read that continues the use before the call is not among the uses of the call.
            continues = num_uses > 0 and self._reads.uses[num_uses - 1] in members
            if may_skip and not continues and self._writes.units.isdisjoint(members):
                self._repeats.note(stage, inputs, structure, output, self._reads.uses[num_uses:])
            return output

        return layer

    def _run(self, path: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record a call of the module at `path`."""
        stage = self._unit_of.get(path)
        if stage is not None:
            # Before `enter`: `_enter_unit` looks up the stage that runs around this one.
            self._enter_unit(stage, tensors_in((args, kwargs)))
        self._reads.enter(path, stage)
        outputs: list[torch.Tensor] = []
        try:
            output = call(*args, **kwargs)
            _check_output(output, path or type(self._model).__name__)
            outputs = tensors_in(output)
        finally:
            # First: `_leave_unit` looks up the stage that runs around this one.
            self._reads.leave(stage)
            if stage is not None:
                self._leave_unit(stage, outputs)
        return output

    def _repeat(self, members: Sequence[int], original: Call, inputs: Sequence[Any]) -> Any:
        """Record the uses of a block that need not run, and return an output; see [Note: repeated stages]."""
        self._costs.current = stage = members[-1]
        for place in original.uses:
            self._reads.use(members[place])
        output = original.output(inputs)
        self._costs.when_backward_reaches(tensors_in(output), stage)
        return output

    def _enter_unit(self, stage: int, inputs: Sequence[torch.Tensor]) -> None:
        if self._inputs:
            # After the backward of this stage, the backward of the surrounding stage continues.
            outer, entered = self._reads.running[-1], self._inputs[-1]
            self._costs.when_backward_reaches((t for t in inputs if memory_key(t) not in entered), outer)
        self._inputs.append({memory_key(tensor) for tensor in inputs})
        self._costs.enter(stage, inputs)

    def _leave_unit(self, stage: int, outputs: Sequence[torch.Tensor]) -> None:
        self._inputs.pop()
        if self._reads.running:
            self._costs.current = self._reads.running[-1]
        self._costs.leave(stage, outputs)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._writes.note_saved(tensor)
        self._costs.save(tensor, self._inputs[-1] if self._inputs else set())
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # not an operator, and very frequent
        out = self._computes_on.call(func, args, kwargs)
        if not self._costs.in_backward:
            self._writes.note_operator(changed_by(func, args, kwargs))
            for tensor in operands((args, kwargs)):
                stage = self._stage_of_memory.get(memory_key(tensor))
                if stage is not None and self._reads.read(stage) and not self._reads.running:
                    self._costs.current = stage
        # After the reads: a weight that is read outside of all stages makes its stage current.
        flops = self._costs.add(func, args, kwargs, out)
        if self._observer is not None:
            arguments, at = (*args, *kwargs.values()), self._costs
            self._observer(OperatorCall(func, arguments, out, at.current, flops, at.in_backward))
        return out

    def _runs_again(self, unit: Unit) -> bool:
        """True if the forward of a stage can be recomputed in backward: not if it is a TorchScript module."""
        parts = self._model.get_submodule(unit.path).modules()
        return not unit.direct_only and not any(isinstance(part, torch.jit.ScriptModule) for part in parts)

    def _take_over(self, repeats: Repeats) -> None:
        """Record for the skipped blocks the costs and reads of their originals."""
        for block, original in repeats.original.items():
            paths = self._partition.units[block].path, self._partition.units[original].path
            for stage, other in zip(repeats.members(block), repeats.members(original), strict=True):
                self._costs.take_over(stage, other)
                self._reads.take_over(stage, other, *paths)

    def trace(self, micro_batch_size: int) -> Trace:
        """Return the recorded trace. A stage that no operator read is bound while its module runs.

        Raises:
            StreamError: if no operator in this thread read a weight.
        """
        if not self._reads.uses:
            raise StreamError(
                "the forward reads no weights in the thread that calls it",
                where=type(self._model).__name__,
                remedy="compute in the thread that calls the model, not in other threads",
            )
        if self._repeats is not None:
            self._take_over(self._repeats)
        written = self._writes.written
        holders = (s.index for s in self._partition.stages for p in s.params if p.name in written)
        once = self._writes.units.union(holders)  # stages whose forwards cannot run again
        return Trace(
            stages=self._partition.stages,
            uses=tuple(self._reads.uses),
            costs=tuple(
                self._costs.of(stage, recomputable=self._runs_again(unit) and stage not in once)
                for stage, unit in enumerate(self._partition.units)
            ),
            sites=self._reads.sites(),
            micro_batch_size=micro_batch_size,
            inference=self._inference,
            written=written,
            assigned_after_use=self._writes.assigned_after_use,
        )
