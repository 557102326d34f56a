"""The recorder of a dry run: calls of modules, operators, and reads and writes of weights."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import GeneratorType
from typing import Any, final

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from headwater.core.errors import StreamError
from headwater.core.loss_function import LossFunction
from headwater.core.module_calls import Layer, surround
from headwater.core.trees import operands, tensors_in
from headwater.plan.alive import has_storage, memory_key
from headwater.plan.host_arguments import HostArguments
from headwater.plan.outside import OwnGraph
from headwater.plan.partition import Partition, Unit
from headwater.plan.reads import WeightReads
from headwater.plan.repeats import Call, Repeats
from headwater.plan.stage_costs import StageCosts
from headwater.plan.step_trace import Trace
from headwater.plan.tensors import State, Tensors
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


@final
class Recorder(TorchDispatchMode):
    """A dispatch mode that records module calls and operators; `trace` returns the result."""

    supports_higher_order_operators = True  # they are refused below, with an error of this package

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
        self._host = HostArguments(tensors.batch)
        self._observer = observer
        self._repeats = repeats
        self._inference = inference
        self._unit_of = {
            unit.path: index for index, unit in enumerate(partition.units) if not unit.direct_only
        }
        self._stage_of_memory: dict[int, int] = {}
        self._thread = threading.get_ident()
        self._costs = StageCosts(len(partition.stages), inference=inference)
        self._reads = WeightReads(partition)
        self._calls = _StageCalls(self._costs, self._reads)
        self._writes = ParameterWrites({}, self._reads.running)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out torch's wrapper of `__torch_dispatch__`: the compiler is off during a dry run."""
        return False

    def run(self, batch: Any, loss_function: LossFunction) -> None:
        """Run one step and record it."""
        with _without_functions():
            state = self._state()
            # Just before the forward: all nodes that autograd has recorded so far come from outside.
            graph = OwnGraph(state.values())
        torch.func.functional_call(
            _Step(self._model, lambda batch: self._step(batch, loss_function, graph)),
            {f"model.{name}": tensor for name, tensor in state.items()},
            (self._computes_on.batch(batch),),
        )

    def _state(self) -> State:
        """Return the tensors that replace the model's, and note the stage of each parameter among them."""
        state = self._computes_on.state(self._model, self._partition)
        for stage in self._partition.stages:
            for param in stage.params:
                self._stage_of_memory[memory_key(state[param.name])] = stage.index
        params = {param.name: state[param.name] for stage in self._partition.stages for param in stage.params}
        self._writes = ParameterWrites(params, self._reads.running)
        self._costs.leave_out(params.values(), state.values())
        return state

    def _step(self, batch: Any, loss_function: LossFunction, graph: OwnGraph) -> None:
        with self._recording(), torch.set_grad_enabled(not self._inference):
            loss = loss_function(self._model, batch)
        # A model may return only detached outputs, because its forward runs the backwards itself.
        if not self._inference and loss.requires_grad:
            with self._recording_backward():
                graph.backward(loss)

    @contextmanager
    def _recording(self) -> Iterator[None]:
        """Enter a context that records the module calls and operators of a forward."""
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
        """Enter a context that records the operators of a backward, which runs outside of autocast."""
        self._costs.in_backward = True
        with ExitStack() as stack:
            if self._repeats is not None:
                for module in self._model.modules():
                    stack.callback(surround(module, self._recomputed))
            stack.enter_context(self)
            stack.enter_context(torch.autocast("cpu", enabled=False))
            yield

    def _recomputed(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module that backward calls again, as a checkpoint does. Then no stage may be skipped."""
        # Only calls of modules count. A layer's own backward may compute a function again with gradients, but
        # that cost is among the costs that a skipped layer takes over.
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
            return self._run_or_repeat(self._repeats, stage, path, call, args, kwargs)

        return layer

    def _run_or_repeat(
        self,
        repeats: Repeats,
        stage: int,
        path: str,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a stage, or skip it if a call that costs the same has run; see [Note: repeated stages]."""
        inputs, structure = tree_flatten((args, kwargs))
        members = repeats.members(stage)
        # With other hooks, such as a checkpoint's, a skipped call would save other tensors than a real one.
        may_skip = torch._C._autograd._top_saved_tensors_default_hooks(False)[0] == self._pack
        repeated = repeats.call_like(stage, inputs, structure, may_skip=may_skip)
        if repeated is not None:
            self._calls.note_inputs(stage, inputs)
            return self._repeat(members, repeated, inputs)
        num_uses = len(self._reads.uses)
        output = self._run(path, call, args, kwargs)
        # A read that continues the use before the call is not among the uses of the call.
        continues = num_uses > 0 and self._reads.uses[num_uses - 1] in members
        if may_skip and not continues and self._writes.units.isdisjoint(members):
            repeats.note(stage, inputs, structure, output, self._reads.uses[num_uses:])
        return output

    def _run(self, path: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record a call of the module at `path`."""
        stage = self._unit_of.get(path)
        with _without_functions():
            self._calls.enter(path, stage, (args, kwargs))
        outputs: list[torch.Tensor] = []
        try:
            with self._computes_on.module_call():
                output = call(*args, **kwargs)
            _check_output(output, path or type(self._model).__name__)
            outputs = tensors_in(output)
        finally:
            with _without_functions():
                self._calls.leave(stage, outputs)
        return output

    def _repeat(self, members: Sequence[int], original: Call, inputs: Sequence[Any]) -> Any:
        """Record the uses of a block that is skipped, and return an output like that of `original`."""
        self._costs.current = stage = members[-1]
        for place in original.uses:
            self._reads.use(members[place])
        output = original.output(inputs)
        self._costs.when_backward_reaches(tensors_in(output), stage)
        return output

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._writes.note_saved(tensor)
        self._costs.save(tensor, self._calls.inputs)
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            raise _higher_order(func)
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # not an operator, and very frequent
        args, kwargs = self._host.of(args, kwargs)
        out = self._computes_on.call(func, args, kwargs)
        if not self._costs.in_backward:
            changed = changed_by(func, args, kwargs)
            self._writes.note_operator(changed)
            self._writes.units.update(self._calls.with_input(changed))
            for tensor in operands((*args, *kwargs.values())):
                stage = self._stage_of_memory.get(memory_key(tensor))
                if stage is not None and self._reads.read(stage) and not self._reads.running:
                    self._costs.current = stage
        # This comes after the reads: a weight that is read outside of all stages makes its stage current.
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
                remedy="compute in the thread that calls the model, and read weights as attributes of its "
                "modules; if a loss keeps the weights of networks, as in torchrl, compile the networks first",
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


@final
class _StageCalls:
    """The calls of modules that run now, one inside the other, and the stage to which costs are added.

    Args:
        costs: the costs of the stages.
        reads: the reads of weights.
    """

    def __init__(self, costs: StageCosts, reads: WeightReads) -> None:
        self._costs = costs
        self._reads = reads
        self._inputs: list[set[int]] = []  # memory of the inputs of each stage that runs
        # memory key -> the storage, and the stages that had a tensor of it as an input
        self._stages_of: dict[int, tuple[StorageWeakRef, set[int]]] = {}

    @property
    def inputs(self) -> set[int]:
        """The memory of the inputs of the innermost stage that runs."""
        return self._inputs[-1] if self._inputs else set()

    def with_input(self, changed: Iterable[torch.Tensor]) -> set[int]:
        """Return the stages that have or had one of these tensors, or a view of it, as an input."""
        found = (self._stages_of.get(memory_key(tensor)) for tensor in changed)
        return set().union(*(stages for _, stages in filter(None, found)))

    def note_inputs(self, stage: int, inputs: Iterable[Any]) -> None:
        """Record that these tensors are inputs of a stage. Other values are left out."""
        for tensor in inputs:
            if isinstance(tensor, torch.Tensor) and has_storage(tensor):
                # A weak reference reserves the storage's address, so that no later storage gets its key.
                new = StorageWeakRef(tensor.untyped_storage()), set[int]()
                self._stages_of.setdefault(memory_key(tensor), new)[1].add(stage)

    def enter(self, path: str, stage: int | None, arguments: Any) -> None:
        """Begin a call.

        Args:
            path: qualified name of the module.
            stage: the stage that consists of this module, or `None`.
            arguments: arguments of the call, in any nesting.
        """
        if stage is not None:
            inputs = tensors_in(arguments)
            if self._inputs:
                # After the backward of this stage, the backward of the surrounding stage continues.
                outer, entered = self._reads.running[-1], self._inputs[-1]
                self._costs.when_backward_reaches((t for t in inputs if memory_key(t) not in entered), outer)
            self._inputs.append({memory_key(tensor) for tensor in inputs})
            self.note_inputs(stage, inputs)
            self._costs.enter(stage, inputs)
        self._reads.enter(path, stage)  # last: the code above looks up the surrounding stage

    def leave(self, stage: int | None, outputs: Sequence[torch.Tensor]) -> None:
        """End the innermost call, which has made these outputs; `stage` is the argument of its `enter`."""
        self._reads.leave(stage)  # first: the code below looks up the surrounding stage
        if stage is not None:
            self._inputs.pop()
            if self._reads.running:
                self._costs.current = self._reads.running[-1]
            self._costs.leave(stage, outputs)


class _Step(nn.Module):
    """A module whose forward is a whole training step, so that `functional_call` encloses backward too.

    Backward must be inside the call: a recomputed forward runs there, and must find the same parameters.
    """

    def __init__(self, model: nn.Module, step: Callable[[Any], None]) -> None:
        super().__init__()
        self.model = model
        self.forward = step


def _without_functions() -> AbstractContextManager[None]:
    """Return a context without `__torch_function__`, which would slow down reads of a tensor's attributes."""
    guard: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return guard


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


def _higher_order(operator: HigherOrderOperator) -> StreamError:
    """Return the error for an operator that calls functions, such as `torch.cond`."""
    return StreamError(
        f"the forward calls torch's operator {operator.name()!r}, which calls functions of the forward. The "
        "dry run cannot see which weights these read",
        remedy="write it in Python, for example `if` and `for` instead of torch.cond and torch.while_loop",
    )
