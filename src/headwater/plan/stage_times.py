"""Prediction of the seconds that the device computes in each stage, from the dry run and measured rates."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, final

from headwater.plan.memory.stages import StageBytes
from headwater.plan.rates import Calibration
from headwater.plan.step_trace import PhaseCost
from headwater.plan.types import Activations, Plan

if TYPE_CHECKING:
    from headwater.plan.footprint import Footprint

OPERATOR_S = 1.5e-5
"""Time of a CPU for each operator beside its arithmetic: Python, autograd and the call. See docs/log.md."""

_FORWARD_SHARE = 1 / 3  # the forward's share of the time outside of matrix products


@dataclasses.dataclass(frozen=True)
class StageSeconds:
    """Seconds of one micro-batch in a stage, for all its uses. Recomputation counts as backward."""

    forward: float
    backward: float


@final
class StageTimes:
    """Predicts the seconds of one micro-batch in each stage, for the plans of one trace.

    Args:
        footprint: the bytes of the trace.
        rates: rates of the machine.
    """

    def __init__(self, footprint: Footprint, rates: Calibration) -> None:
        self._footprint = footprint
        self._rates = rates
        self._known: dict[object, list[StageSeconds]] = {}

    def of(self, plan: Plan) -> list[StageSeconds]:
        """Return the seconds of one micro-batch in each stage, without `USE_OVERHEAD_S`."""
        # The key has all that the seconds depend on. Many plans of a search differ only in other attributes.
        work = plan.activations, plan.precision.name, plan.num_micro_batches
        key = work, plan.device, plan.on_device, plan.returns_pages
        if key not in self._known:
            self._known[key] = self._count(plan)
        return self._known[key]

    def _count(self, plan: Plan) -> list[StageSeconds]:
        """Return the result of `of`, without a look into its cache."""
        trace, name = self._footprint.trace, plan.precision.name
        products_per_s, attention_per_s = (
            self._rates.flops_per_s(name),
            self._rates.attention_flops_per_s(name),
        )
        # A dry run for a GPU, or for another machine, may have used the kernel of this machine.
        kernel_per_s = self._rates.kernel_attention_flops_per_s or attention_per_s
        saved_bytes_per_s = self._rates.saved_bytes_per_s(name)

        def flops_s(phase: PhaseCost) -> float:
            attention, kernel = phase.attention_flops, phase.kernel_attention_flops
            products = phase.flops - attention - kernel
            return products / products_per_s + attention / attention_per_s + kernel / kernel_per_s

        new_bytes_per_s = self._rates.new_bytes_per_s if plan.returns_pages else None

        def system_s(operators: int, new_bytes: int) -> float:
            calls = OPERATOR_S * operators if plan.device == "cpu" else 0.0
            return calls + (0.0 if new_bytes_per_s is None else new_bytes / new_bytes_per_s)

        stages = []
        costs = zip(trace.costs, plan.activations, self._footprint.stages, strict=True)
        for index, (cost, policy, held) in enumerate(costs):
            others = (cost.saved_bytes + cost.transient_bytes) / saved_bytes_per_s
            forward = flops_s(cost.forward)
            forward += _FORWARD_SHARE * others + system_s(cost.forward.operators, cost.forward.new_bytes)
            backward = flops_s(cost.backward) + (1 - _FORWARD_SHARE) * others
            backward += system_s(cost.backward.operators, cost.backward.new_bytes)
            backward += forward if policy.is_recomputed else 0.0
            if policy is Activations.SELECTIVE:
                backward += _FORWARD_SHARE * cost.again_bytes / saved_bytes_per_s
                backward += system_s(0, cost.again_bytes)
            backward += self._sum_s(plan, index, held)
            stages.append(StageSeconds(forward, 0.0 if trace.inference else backward))
        return stages

    def _sum_s(self, plan: Plan, index: int, stage: StageBytes) -> float:
        """Return the seconds in which the device adds a stage's gradients of one of several micro-batches."""
        if plan.device != "cpu" and index not in plan.on_device:  # the host adds them meanwhile
            return 0.0
        if self._footprint.gradients.sums_stay:
            return 0.0
        return summed_bytes(stage, plan.num_micro_batches) / self._rates.memory_bytes_per_s


def summed_bytes(stage: StageBytes, count: int) -> float:
    """Return the bytes that the sums of a stage's gradients move in one of `count` micro-batches."""
    if count == 1 or not stage.trained:
        return 0.0
    # The first gradients become the sums. All later additions read the sums and write them.
    return stage.gradient + (2 - 1 / count) * stage.gradient_sum
