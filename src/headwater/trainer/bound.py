"""The summary of a run: what it was bound by, and the one setting that would help most."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from headwater.core.units import format_bytes
from headwater.plan.types import Plan
from headwater.trainer.callback import Callback, FitStart, StepEnd

logger = logging.getLogger(__name__)

_LEAST_STEPS = 3
"""Runs with fewer steps get no summary. The first step does not count, and one or two more say little."""
_LEAST_SHARE = 0.05
"""A setting that would save a smaller share of the time is not named."""


@dataclasses.dataclass(frozen=True)
class Advice:
    """A setting that would make a run faster.

    Attributes:
        share: share of the time of a step that it may save.
        text: what to set, and why.
    """

    share: float
    text: str


class BoundSummary(Callback):
    """Logs one line at the end of the run: what limited its speed, and which setting would help most."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._bound_s: dict[str, float] = {}
        self._whole_s = 0.0
        self._steps = 0

    def on_fit_start(self, event: FitStart) -> None:
        self._plan = event.plan

    def on_step_end(self, event: StepEnd) -> None:
        self._steps += 1
        if self._steps == 1:
            return  # the first step fills slabs and allocates memory
        self._whole_s += event.step_s
        for bound, seconds in event.bound_s.items():
            self._bound_s[bound] = self._bound_s.get(bound, 0.0) + seconds

    def on_fit_end(self) -> None:
        if self._steps >= _LEAST_STEPS and self._plan is not None and self._bound_s:
            logger.info("%s", summary(self._bound_s, self._whole_s, self._plan))


def summary(bound_s: Mapping[str, float], whole_s: float, plan: Plan) -> str:
    """Return the line.

    Args:
        bound_s: seconds by the part of the machine that limited the computing thread.
        whole_s: seconds of all steps.
        plan: the plan of the steps.
    """
    shares = {bound: seconds / whole_s for bound, seconds in bound_s.items()}
    order = sorted(shares, key=lambda bound: -shares[bound])
    listed = ", ".join(f"{bound} {shares[bound]:.0%}" for bound in order if shares[bound] >= 0.01)
    advice = best_advice(shares, plan)
    return f"bound by {order[0]}: {listed} of the time{'' if advice is None else f'; {advice.text}'}"


def best_advice(shares: Mapping[str, float], plan: Plan) -> Advice | None:
    """Return the setting that would save most; `None` if none would save much.

    Args:
        shares: share of the time by the part of the machine that limited the computing thread.
        plan: the plan of the steps.
    """
    found = [
        advice
        for advice in (
            _tier_advice(shares.get("disk", 0.0), plan),
            _activation_advice(shares.get("compute", 0.0), plan),
            _input_advice(shares.get("input", 0.0)),
        )
        if advice is not None and advice.share >= _LEAST_SHARE
    ]
    return max(found, key=lambda advice: advice.share, default=None)


def _tier_advice(share: float, plan: Plan) -> Advice | None:
    if plan.tier != "disk" and plan.gradient_tier != "disk":
        return None
    needed = 0 if plan.prediction is None else plan.prediction.host_bytes + plan.prediction.disk_bytes
    if plan.host_limit is not None and plan.host_limit >= needed:
        return Advice(share, "tier: memory (or auto) would save the waits for the disk")
    setting = f"host_memory: {format_bytes(needed)}" if needed else "a larger host_memory"
    return Advice(share, f"{setting} would keep all weights in memory and save the waits for the disk")


def _activation_advice(share: float, plan: Plan) -> Advice | None:
    """Return the advice to keep activations that are recomputed, if only memory prevents this."""
    costs = list(zip(plan.trace.costs, plan.activations, strict=True))
    again = sum(cost.forward.flops for cost, policy in costs if policy.is_recomputed)
    if not again:
        return None
    whole = sum(cost.forward.flops + cost.backward.flops for cost, _ in costs) + again
    more = sum(cost.saved_bytes for cost, policy in costs if policy.is_recomputed)
    which = "host_memory" if plan.device == "cpu" else "device_memory"
    text = f"{format_bytes(more)} more {which} would keep the activations that are recomputed now"
    return Advice(share * again / whole, text)


def _input_advice(share: float) -> Advice | None:
    return Advice(share, "a larger num_workers of the train_dataloader would shorten the waits for data")
