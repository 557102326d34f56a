"""A dry run that is recorded: which operators run in which stage, and which of them no graph can hold."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from headwater.core.errors import HeadwaterError
from headwater.core.loss_function import LossFunction, call_model
from headwater.core.module_parameters import named_parameters_of
from headwater.core.precision import Precision
from headwater.core.trees import tensors_in
from headwater.plan.capture.dtypes import dtype_problem
from headwater.plan.capture.failures import RefusedCall, check_loss, error_with_place
from headwater.plan.capture.findings import Finding, Findings
from headwater.plan.capture.place import Locator, tensor_text
from headwater.plan.partition import Partition, find_stages
from headwater.plan.step_trace import Trace
from headwater.plan.trace import trace_step, widen_uncast
from headwater.plan.trace_recorder import OperatorCall


@dataclasses.dataclass
class OperatorTotal:
    """All calls of one operator by one stage in a micro-batch.

    Attributes:
        forward: calls in the forward.
        backward: calls in the backward.
        flops: floating-point operations.
        read_bytes: bytes of the tensors among its arguments; a view reads none.
        written_bytes: bytes of the tensors that it returns; a view writes none.
    """

    forward: int = 0
    backward: int = 0
    flops: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    def __add__(self, other: OperatorTotal) -> OperatorTotal:
        # `dataclasses.astuple` would be slow: it copies fields deeply, and there is a sum for every operator.
        return OperatorTotal(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            flops=self.flops + other.flops,
            read_bytes=self.read_bytes + other.read_bytes,
            written_bytes=self.written_bytes + other.written_bytes,
        )


@dataclasses.dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        path: its qualified name.
        args: its arguments, as fake tensors.
        kwargs: its keyword arguments.
        digest: equal for calls that run equal operators on equal shapes in equal order.
    """

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    digest: str


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """The record of a training step that ran on fake tensors, with one micro-batch.

    Attributes:
        trace: its dry run.
        partition: the stages, and the modules they belong to.
        precision: precision of the run.
        readers: the outermost modules that contain no stage except their own -> the stages whose weights they
            read.
        calls: calls of these modules, in order.
        operators: totals by operator, one dictionary for each stage.
        findings: operators that graphs cannot hold.
        unused: trainable parameters that get no gradient.
        batch: dtypes and shapes of the tensors of the batch, as text.
        warnings: warnings of torch.
    """

    trace: Trace
    partition: Partition
    precision: Precision
    readers: dict[str, tuple[int, ...]]
    calls: tuple[ModuleCall, ...]
    operators: tuple[dict[str, OperatorTotal], ...]
    findings: tuple[Finding, ...]
    unused: tuple[str, ...]
    batch: tuple[str, ...]
    warnings: tuple[str, ...]


def record_step(
    model: nn.Module,
    batch: Any,
    precision: Precision | None = None,
    *,
    loss_function: LossFunction = call_model,
    own_loop: bool = False,
) -> StepRecord:
    """Run forward, loss and backward of one micro-batch on fake tensors, and record the operators.

    Args:
        model: parameters and buffers may be on the meta device; it is not changed.
        batch: tensors in any nesting (real, fake or meta; only shapes and dtypes matter).
        precision: precision of the run; fp32 if not given.
        loss_function: returns the scalar loss.
        own_loop: send weights in the dtypes that a user's loop needs; see [Note: weights in fp32 under
            autocast] in `plan/cast_reads.py`.

    Returns:
        The record.

    Raises:
        ModelError: if model, loss and batch do not fit together.
        PlanError: if the model has no parameters.
    """
    precision = precision or Precision()
    partition = find_stages(model, precision)
    with warnings.catch_warnings(record=True) as caught:
        # By default Python drops a warning that this process has shown before.
        warnings.simplefilter("always")
        if own_loop:
            with _Recorder(model, partition, loss_function).explaining() as first:
                partition = widen_uncast(partition, model, batch, precision, loss_function=first.loss)
        with _Recorder(model, partition, loss_function).explaining() as recorder:
            trace = trace_step(
                model,
                batch,
                precision,
                loss_function=recorder.loss,
                partition=partition,
                observer=recorder.observe,
            )
    readers = _readers(trace, partition, {call.path for call in recorder.calls})
    return StepRecord(
        trace=trace,
        partition=partition,
        precision=precision,
        readers=readers,
        calls=tuple(call for call in recorder.calls if call.path in readers),
        operators=tuple(recorder.operators),
        findings=tuple(recorder.findings),
        unused=recorder.unused,
        batch=tuple(tensor_text(tensor) for tensor in tensors_in(batch)),
        warnings=tuple(dict.fromkeys(str(warning.message) for warning in caught)),
    )


def _readers(trace: Trace, partition: Partition, called: set[str]) -> dict[str, tuple[int, ...]]:
    """Return the outermost called modules with at most one stage in them, and the stages that each reads."""
    units = [unit.path for unit in partition.units]
    single = {path for path in called if not any(_is_inside(unit, path) for unit in units)}
    readers = {}
    for path in single:
        stages = [trace.sites[site] for site in trace.sites if site == path or _is_inside(site, path)]
        if stages and not any(_is_inside(path, outer) for outer in single):
            readers[path] = tuple(sorted(set().union(*stages)))
    return readers


def _is_inside(path: str, outer: str) -> bool:
    return path.startswith(f"{outer}." if outer else "") and path != outer


class _Recorder:
    """Recorder of a dry run: `trace_step` gets its methods `loss` and `observe` as arguments."""

    def __init__(self, model: nn.Module, partition: Partition, loss_function: LossFunction) -> None:
        self._model = model
        self._loss_function = loss_function
        self.locator = Locator(model, trace_step.__code__)
        self._params: dict[str, nn.Parameter] = {}
        self._open: list[_Digest] = []
        self.calls: list[ModuleCall] = []
        self.operators: list[dict[str, OperatorTotal]] = [{} for _ in partition.units]
        self.findings = Findings()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the loss of the batch from the user's function."""
        # The parameters are read here: the model has those that get gradients only inside the dry run.
        self._params = dict(named_parameters_of(model))
        with self._watching_modules():
            loss = self._loss_function(model, batch)
        check_loss(loss)
        return loss

    @contextmanager
    def explaining(self) -> Iterator[_Recorder]:
        """Enter a context in which an error of the dry run becomes one that names module and source line."""
        try:
            yield self
        except HeadwaterError:
            raise
        except Exception as error:  # the user's model and loss can raise any exception
            problem = error_with_place(error, self._model, self.locator)
            if problem is None:
                raise
            raise problem from error

    @property
    def unused(self) -> tuple[str, ...]:
        """Trainable parameters that have no gradient after backward."""
        return tuple(n for n, param in self._params.items() if param.requires_grad and param.grad is None)

    @contextmanager
    def _watching_modules(self) -> Iterator[None]:
        with ExitStack() as stack:
            for path, module in self._model.named_modules():
                enter = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                leave = module.register_forward_hook(self._leave(path), with_kwargs=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            yield

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._open.append(_Digest(tensors_in((args, kwargs))))

    def _leave(self, path: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.calls.append(ModuleCall(path, args, kwargs, self._open.pop().hexdigest()))

        return hook

    def observe(self, call: OperatorCall) -> None:
        """Record one operator. Operators that only return a device or a size compute nothing."""
        if call.func.namespace == "prim":
            return
        name = str(call.func._overloadpacket)
        totals = self.operators[call.stage]
        totals[name] = totals.get(name, OperatorTotal()) + _total(call)
        if call.backward:
            return
        problem = dtype_problem(call)
        if problem is not None:
            raise RefusedCall(problem)
        # Calls of modules are nested, so an operator belongs to every call that has not ended yet.
        for digest in self._open:
            digest.add(call)
        self._look_for_finding(call, name)

    def _look_for_finding(self, call: OperatorCall, name: str) -> None:
        place = self.locator.find(traceback.walk_stack(sys._getframe()))
        if place is None:
            return
        modules = (place.module,)
        if torch.Tag.data_dependent_output in call.func.tags:
            self.findings.add(f"{name} (.item())", "a number is read out of a tensor", place, modules)
        if _has_dynamic_shape(call):
            self.findings.add(name, "the shape of its result depends on data", place, modules)
        if place.function is not None:
            problem = "a custom autograd function: a graph holds its forward, and not the backward it defines"
            self.findings.add(place.function, problem, place, modules)


class _Digest:
    """A fingerprint of a call: operators, shapes, and which earlier result each operator takes as input."""

    def __init__(self, inputs: list[torch.Tensor]) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._seen: dict[int, int] = {}
        self._keep_alive: list[torch.Tensor] = []  # so that another tensor does not get the same identity
        self._hash.update(repr([self._text(tensor) for tensor in inputs]).encode())

    def add(self, call: OperatorCall) -> None:
        described = tree_map(self._text, (call.args, call.out))
        self._hash.update(f"{call.func} {described}".encode())

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def _text(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        self._keep_alive.append(value)
        return f"{self._seen.setdefault(id(value), len(self._seen))}:{tensor_text(value)}"


def _has_dynamic_shape(call: OperatorCall) -> bool:
    """True if the shape of the result depends on data. For indexing, only masks have that effect."""
    if call.func is torch.ops.aten.index.Tensor:
        return any(index.dtype in (torch.bool, torch.uint8) for index in call.args[1] if index is not None)
    return torch.Tag.dynamic_output_shape in call.func.tags


def _total(call: OperatorCall) -> OperatorTotal:
    read, written = (0, 0) if call.func.is_view else (_bytes(call.args), _bytes(call.out))
    return OperatorTotal(not call.backward, call.backward, call.flops, read, written)


def _bytes(tree: Any) -> int:
    distinct = {id(tensor): tensor for tensor in tensors_in(tree)}
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())
