"""Plans for a step that was recorded on fake tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, final

from torch import nn

from headwater.core.errors import DoesNotFitError
from headwater.core.loss_function import LossFunction
from headwater.optim.spec import OptimizerSpec
from headwater.plan.budget import make_plan
from headwater.plan.capture.record import StepRecord
from headwater.plan.capture.state import optimizer_state_bytes
from headwater.plan.division import divisions
from headwater.plan.options import Fixed, PlanRequest, TraceFor
from headwater.plan.partition import Partition
from headwater.plan.step_trace import Trace
from headwater.plan.trace import trace_step
from headwater.plan.types import Plan, Resources


@final
@dataclasses.dataclass(frozen=True)
class RecordPlanner:
    """Plans a recorded step on a device. The batch of the record is the micro-batch of the plan.

    Attributes:
        model: the model.
        batch: the arguments of its forward.
        record: the step.
        loss_function: returns the loss.
        device: `cpu` or `cuda`.
    """

    model: nn.Module
    batch: Any
    record: StepRecord
    loss_function: LossFunction
    device: str

    def plan(self, optimizer: OptimizerSpec, resources: Resources, fixed: Fixed) -> Plan | DoesNotFitError:
        """Plan a step with one micro-batch. Return the plan, or the error if no plan fits the limits.

        Args:
            optimizer: the optimizer of the weights.
            resources: resource limits of the run.
            fixed: decisions that the planner must keep.
        """
        # The record is that of the CPU, and the plan counts the bytes of the device.
        trace = self.record.trace if self.device == "cpu" else self._trace(self.record.partition)
        trace = trace.storing(fixed.optimizer_state)
        params = [param for stage in trace.stages for param in stage.params]
        trained = sum(param.numel for param in params if param.requires_grad)
        size = trace.micro_batch_size
        try:
            return make_plan(
                PlanRequest(
                    lambda _: trace,  # the micro-batch has only one size
                    divided=self._divided,
                    batch_size=size,
                    precision=self.record.precision,
                    # Rounded up: the planned memory must hold the whole state.
                    optimizer_state_bytes=-(-optimizer_state_bytes(optimizer, params) // max(1, trained)),
                    resources=resources,
                    device=self.device,
                    fixed=dataclasses.replace(fixed, micro_batch_size=size),
                )
            )
        except DoesNotFitError as error:
            # Not raised: the report of a model that is too large for this machine is still written.
            return error

    def _trace(self, partition: Partition) -> Trace:
        """Return the dry run with the stages of a partition."""
        return trace_step(
            self.model,
            self.batch,
            self.record.precision,
            loss_function=self.loss_function,
            partition=partition,
            device=self.device,
        )

    def _divided(self) -> Iterator[TraceFor]:
        """Return the dry runs with ever smaller stages. Each is made when it is used."""

        def lazy(partition: Partition) -> TraceFor:
            return functools.cache(lambda size: self._trace(partition))

        return map(lazy, divisions(self.model, self.record.partition))
