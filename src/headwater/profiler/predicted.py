"""The work of one step as a plan predicts it, in the lanes of a picture."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import final

from headwater.plan.types import Plan

FORWARD, BACKWARD = "forward", "backward"

Bar = tuple[float, float, str]
"""Begin and end in seconds, and the kind of work."""


def predicted_lanes(plan: Plan) -> dict[str, list[Bar]]:
    """Return the bars of each lane; nothing if the plan predicts no time.

    The plan predicts the seconds of each kind. They are divided among the stages by their FLOPs and bytes,
    and equally among the uses of a stage. They are placed in the order of the schedule: weights arrive one
    stage ahead of their use. Then all times are scaled, so that the last bar ends with the predicted step.
    """
    prediction = plan.prediction
    if prediction is None or prediction.step_s is None:
        return {}
    seconds = _stage_seconds(plan, prediction.step_parts)
    lanes = _Lanes(in_place=plan.in_place)
    uses = [(stage, True) for stage in plan.trace.uses] + [(stage, False) for stage in plan.trace.uses[::-1]]
    parts = Counter(plan.trace.uses)  # a stage with tied weights is used several times in a forward
    seen: set[int] = set()
    for stage, forward in uses * plan.num_micro_batches:
        arrived = 0.0 if stage in seen else lanes.fetch(seconds[stage])
        seen.add(stage)
        computing_s = seconds[stage].forward if forward else seconds[stage].backward
        kind = FORWARD if forward else BACKWARD
        lanes.compute(kind, computing_s / parts[stage] / plan.num_micro_batches, after=arrived)
    return lanes.scaled(prediction.step_s)


@dataclasses.dataclass(frozen=True)
class _StageSeconds:
    """The predicted seconds of one stage in a step.

    Attributes:
        forward: forwards of all micro-batches.
        backward: their backwards.
        disk: reads from disk.
        update: the update in host memory. An update on the device counts as computation.
        copy: the copy into a slab.
    """

    forward: float
    backward: float
    disk: float
    update: float
    copy: float


def _stage_seconds(plan: Plan, parts: Mapping[str, float]) -> list[_StageSeconds]:
    """Divide the predicted seconds of each kind of work among the stages."""
    weights = [float(stage.slab_bytes) for stage in plan.trace.stages]
    computed_s = parts.get("compute", 0.0) + parts.get("update on device", 0.0)
    computing = _divided(computed_s, [each for pair in _work(plan) for each in pair])
    disk = _divided(parts.get("disk", 0.0), weights)
    updates = _divided(parts.get("update", 0.0), weights)
    copies = _divided(parts.get("copy", 0.0) + parts.get("link", 0.0), weights)
    return [
        _StageSeconds(*each)
        for each in zip(computing[::2], computing[1::2], disk, updates, copies, strict=True)
    ]


@final
class _Lanes:
    """The bars of each lane, in seconds from the begin of the step.

    Args:
        in_place: True if weights are read in the store. The update of a stage then begins when the stages
            before it are computed, not when they are fetched.
    """

    def __init__(self, *, in_place: bool) -> None:
        self._in_place = in_place
        self._bars: dict[str, list[Bar]] = {lane: [] for lane in ("compute", "weights in", "update", "disk")}
        self._fetched = 0.0
        self._computed = 0.0

    def fetch(self, stage: _StageSeconds) -> float:
        """Add the work on a stage's weights before their use; return the time at which they are ready."""
        begin = self._computed if self._in_place else self._fetched
        for lane, kind, seconds in (
            ("disk", "disk read", stage.disk),
            ("update", "update", stage.update),
            ("weights in", "fetch", stage.copy),
        ):
            if seconds:
                self._bars[lane].append((begin, begin + seconds, kind))
                begin += seconds
        self._fetched = begin
        return begin

    def compute(self, kind: str, seconds: float, *, after: float) -> None:
        """Add computation that begins when the one before it is done, and not before the time `after`."""
        begin = max(self._computed, after)
        self._computed = begin + seconds
        self._bars["compute"].append((begin, self._computed, kind))

    def scaled(self, step_s: float) -> dict[str, list[Bar]]:
        """Return the bars of each lane, with all times scaled so that the last bar ends at `step_s`."""
        last = max((end for bars in self._bars.values() for _, end, _ in bars), default=0.0)
        scale = step_s / last if last else 1.0
        return {
            lane: [(begin * scale, end * scale, kind) for begin, end, kind in bars]
            for lane, bars in self._bars.items()
        }


def _work(plan: Plan) -> list[tuple[float, float]]:
    """Return the relative work of each stage, forward and backward. Other work counts like 8 FLOPs a byte."""
    found = []
    for cost, policy in zip(plan.trace.costs, plan.activations, strict=True):
        others = 8.0 * (cost.saved_bytes + cost.transient_bytes)
        forward = cost.forward.flops + others / 3
        backward = cost.backward.flops + 2 * others / 3
        found.append((forward, backward + (forward if policy.is_recomputed else 0.0)))
    return found


def _divided(seconds: float, work: Sequence[float]) -> list[float]:
    """Divide seconds in proportion to the work."""
    whole = sum(work)
    return [seconds * each / whole if whole else 0.0 for each in work]
