"""Compilation before training, on any machine: a training step on fake tensors, without weights or data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from headwater.api.compile_dir import write_compile_dir
from headwater.api.compile_reports import CompileReport, ValidateReport
from headwater.api.loop_steps import runs_in_loop
from headwater.api.model_structure import refuse_no_module
from headwater.core.arithmetic import Kernels
from headwater.core.errors import ConfigError, DoesNotFitError, ModelError
from headwater.core.files import check_place
from headwater.core.loss_function import LossFunction
from headwater.core.module_parameters import parameters_of
from headwater.core.precision import Precision, PrecisionName
from headwater.core.stage import OptimizerState
from headwater.core.trees import tensors_in
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import make_plan
from headwater.plan.capture.graph import capture_stages
from headwater.plan.capture.mlir import MISSING, find_lowering
from headwater.plan.capture.record import StepRecord, record_step
from headwater.plan.capture.state import total_state_bytes
from headwater.plan.division import divisions
from headwater.plan.machine import weight_bytes
from headwater.plan.options import NOT_FIXED, Fixed, PlanRequest, TraceFor
from headwater.plan.partition import Partition
from headwater.plan.step_trace import Trace
from headwater.plan.trace import trace_step
from headwater.plan.types import Plan, ProcessMemory, Resources

ASSUMED_OPTIMIZER = OptimizerSpec("AdamW")
"""The optimizer for which a plan is made if no optimizer is given."""


def validate_only(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_function: LossFunction | None = None,
    optimizer: OptimizerSpec | torch.optim.Optimizer | None = None,
    precision: Precision | PrecisionName | None = None,
    optimizer_state: OptimizerState = "exact",
    own_loop: bool = True,
) -> ValidateReport:
    """Check that a model, its loss, its optimizer and a batch fit each other, by a step on fake tensors.

    Args:
        model: any module; its parameters may be on the meta device. The model is not changed.
        args: positional arguments of the forward, a tuple or one value. Tensors may be on the meta device.
        kwargs: keyword arguments of the forward.
        loss_function: returns the loss, a scalar, given `(model, args)`. If it is not given, the loss is the
            one that the model returns, or a scalar computed from the model's output.
        optimizer: the optimizer of the weights.
        precision: precision of the run, or its name: `fp32`, `bf16` or `fp16`; fp32 if not given.
        optimizer_state: how the weight store keeps optimizer state; see `trainer.init.backend`.
        own_loop: true if a user's loop runs the step, with the dtypes of autocast; false if a `Trainer` runs
            it, which streams all weights except those of norms in `precision`.

    Returns:
        The record of the step, and the bytes of optimizer state.

    Raises:
        ModelError: if the check fails, with module path, source line, shapes and a remedy.
        ConfigError: if the optimizer cannot be built, or an argument has the wrong type.
    """
    refuse_no_module(model, where="validate_only")
    if not isinstance(optimizer, OptimizerSpec | torch.optim.Optimizer | None):
        raise ConfigError(
            f"expected an optimizer of torch, got {optimizer!r}",
            where="optimizer",
            remedy="pass an object such as torch.optim.AdamW(model.parameters())",
        )
    record = record_step(
        model,
        (args, kwargs or {}),
        Precision(precision) if isinstance(precision, str) else precision,
        loss_function=_loss_of(loss_function),
        own_loop=own_loop,
    )
    spec = _spec(optimizer, model)
    params = record.trace.storing(optimizer_state).params
    return ValidateReport(record, spec, 0 if spec is None else total_state_bytes(spec, params))


def compile_only(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_function: LossFunction | None = None,
    optimizer: OptimizerSpec | torch.optim.Optimizer | None = None,
    precision: Precision | PrecisionName | None = None,
    compile_dir: str | Path = "compile",
    device: str = "cpu",
    resources: Resources | None = None,
    fixed: Fixed = NOT_FIXED,
    kernels: Kernels = "exact",
    plan: Plan | DoesNotFitError | None = None,
    own_loop: bool = True,
) -> CompileReport:
    """Write the plan, the graph of each distinct stage and the operators of a training step into a folder.

    Operators that cannot be part of a graph are reported with the module and the source line; a model with
    such operators can still be trained. If no plan fits this machine, the report says why.

    Args:
        model: see `validate_only`.
        args: see `validate_only`; one micro-batch.
        kwargs: see `validate_only`.
        loss_function: see `validate_only`.
        optimizer: the optimizer of the weights. If not given, the plan is made for AdamW.
        precision: see `validate_only`.
        compile_dir: the folder.
        device: `cpu` or `cuda`.
        resources: resource limits of the run; the free resources of the machine if not given.
        fixed: decisions that the planner must keep; the micro-batch is always the given batch.
        kernels: the kernels of matrix products.
        plan: the plan, or the error that says why no plan fits, if the caller has planned already.
        own_loop: see `validate_only`.

    Returns:
        The plan, the graphs and the written files.

    Raises:
        ModelError, ConfigError: see `validate_only`.
        RunError, StoreError: if the files cannot be written.
    """
    folder = Path(compile_dir)
    check_place(folder, expected="a folder")  # now: the work below may take minutes
    valid = validate_only(
        model,
        args,
        kwargs,
        loss_function=loss_function,
        optimizer=optimizer,
        precision=precision,
        own_loop=own_loop,
    )
    record = valid.record
    if plan is None:
        batch, loss = (args, kwargs or {}), _loss_of(loss_function)
        planner = _RecordPlanner(model, batch, record, loss, device, kernels, own_loop)
        plan = planner.plan(valid.optimizer or ASSUMED_OPTIMIZER, resources or Resources(), fixed)
    lowering = find_lowering()
    captured = capture_stages(model, record, lowering)
    refusal = str(plan) if isinstance(plan, DoesNotFitError) else None
    decided = None if isinstance(plan, DoesNotFitError) else plan
    files = write_compile_dir(folder, record, captured, decided or str(refusal))
    mlir = MISSING if lowering is None else "MLIR: graphs/*.mlir"
    return CompileReport(record, captured, decided, refusal, mlir, tuple(files), folder)


def _loss_of(loss_function: LossFunction | None) -> LossFunction:
    """Return a function that computes the loss from a model and `(args, kwargs)`."""
    return _on_arguments if loss_function is None else _on_batch(loss_function)


def _on_batch(loss_function: LossFunction) -> LossFunction:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        # `batch` is `(args, kwargs)`. The user's function expects `args` only.
        return loss_function(model, batch[0])

    return loss


def _on_arguments(model: nn.Module, batch: Any) -> torch.Tensor:
    """Call the model. Return its output `loss`, or else a scalar made from all outputs with gradients."""
    args, kwargs = batch
    output = model(*(args if isinstance(args, tuple) else (args,)), **kwargs)
    # Models of the transformers library return their loss in a field of a mapping or an object.
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    candidate = output if named is None else named
    if isinstance(candidate, torch.Tensor) and candidate.numel() == 1:
        return candidate
    trained = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not trained:
        raise ModelError(
            "expected an output that depends on a trainable parameter, found none",
            where="the model's output",
            remedy="return tensors that depend on trainable parameters, or unfreeze the parameters to train",
        )
    # `stack` needs tensors of one dtype, and a model may return several.
    return torch.stack([tensor.float().mean() for tensor in trained]).sum()


def _spec(optimizer: OptimizerSpec | torch.optim.Optimizer | None, model: nn.Module) -> OptimizerSpec | None:
    """Return the class and the options of an optimizer as plain data.

    Raises:
        ModelError: if the optimizer has parameters that are not in the model.
    """
    if optimizer is None or isinstance(optimizer, OptimizerSpec):
        return optimizer
    own = {id(param) for param in parameters_of(model)}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    foreign = [param for param in params if id(param) not in own]
    if foreign:
        shapes = ", ".join(str(list(param.shape)) for param in foreign[:3])
        raise ModelError(
            f"{len(foreign)} of {len(params)} parameters of the optimizer are not in the model ({shapes} …)",
            where=type(optimizer).__name__,
            remedy="build the optimizer with model.parameters() of this model",
        )
    # An optimizer that steps in the user's loop keeps its state outside of the store.
    return None if runs_in_loop(optimizer) else OptimizerSpec.of(optimizer)


@final
@dataclasses.dataclass(frozen=True)
class _RecordPlanner:
    """Plans a recorded step on a device. The batch of the record is the micro-batch of the plan.

    Attributes:
        model: the model.
        batch: the arguments of its forward.
        record: the step.
        loss_function: returns the loss.
        device: `cpu` or `cuda`.
        kernels: the kernels of matrix products.
        own_loop: see `validate_only`.
    """

    model: nn.Module
    batch: Any
    record: StepRecord
    loss_function: LossFunction
    device: str
    kernels: Kernels
    own_loop: bool

    def plan(self, optimizer: OptimizerSpec, resources: Resources, fixed: Fixed) -> Plan | DoesNotFitError:
        """Plan a step with one micro-batch. Return the plan, or the error if no plan fits the limits.

        Args:
            optimizer: the optimizer of the weights.
            resources: resource limits of the run.
            fixed: decisions that the planner must keep.
        """
        # The record was made on the CPU, but the plan must count the bytes on the device.
        trace = self.record.trace if self.device == "cpu" else self._trace(self.record.partition)
        trace = trace.storing(fixed.optimizer_state)
        trained = sum(param.numel for param in trace.params if param.requires_grad)
        size = trace.micro_batch_size
        try:
            return make_plan(
                PlanRequest(
                    lambda _: trace,  # the micro-batch has only one size
                    divided=self._divided,
                    batch_size=size,
                    precision=self.record.precision,
                    optimizer_state_bytes=total_state_bytes(optimizer, trace.params) / max(1, trained),
                    resources=resources,
                    device=self.device,
                    fixed=dataclasses.replace(fixed, micro_batch_size=size),
                    user_loop=self.own_loop,
                    kernels=self.kernels,
                    process=ProcessMemory(initial=weight_bytes(self.model)),
                )
            )
        except DoesNotFitError as error:
            # Not raised: the report is written even if the model is too large for the machine.
            return error

    def _trace(self, partition: Partition) -> Trace:
        """Return a dry run of the model, divided into the stages of `partition`."""
        return trace_step(
            self.model,
            self.batch,
            self.record.precision,
            loss_function=self.loss_function,
            partition=partition,
            device=self.device,
        )

    def _divided(self) -> Iterator[TraceFor]:
        """Yield dry runs with ever smaller stages. A dry run is made only when the planner asks for it."""

        def lazy(partition: Partition) -> TraceFor:
            return functools.cache(lambda size: self._trace(partition))

        return map(lazy, divisions(self.model, self.record.partition))
