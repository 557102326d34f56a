"""The work of one step as a plan predicts it, in the lanes of a picture."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.plan.types import Plan

Bar = tuple[float, float, str]
"""Begin and end in seconds, and the kind of work."""


def predicted_lanes(plan: Plan) -> dict[str, list[Bar]]:
    """Return the bars of each lane; nothing if the plan predicts no time.

    The plan predicts the seconds of each kind. They are divided among the stages by their FLOPs and bytes,
    and placed in the order of the schedule: weights arrive one stage ahead of their use. Then all times are
    scaled, so that the last bar ends with the predicted step.
    """
    prediction = plan.prediction
    if prediction is None or prediction.step_s is None:
        return {}
    parts = prediction.step_parts
    stages = plan.trace.stages
    weights = [float(stage.slab_bytes) for stage in stages]
    work = _work(plan)
    computed_s = parts.get("compute", 0.0) + parts.get("update on device", 0.0)
    computing = _divided(computed_s, [each for pair in work for each in pair])
    updates = _divided(parts.get("update", 0.0), weights)
    copies = _divided(parts.get("copy", 0.0) + parts.get("link", 0.0), weights)
    disk = _divided(parts.get("disk", 0.0), weights)
    lanes: dict[str, list[Bar]] = {lane: [] for lane in ("compute", "weights in", "update", "disk")}
    fetched = computed = 0.0
    seen: set[int] = set()
    uses = [(stage, True) for stage in plan.trace.uses] + [(stage, False) for stage in plan.trace.uses[::-1]]
    for stage, forward in uses * plan.num_micro_batches:
        ready = 0.0
        if stage not in seen:
            seen.add(stage)
            begin = computed if plan.in_place else fetched
            for lane, kind, seconds in (
                ("disk", "disk read", disk[stage]),
                ("update", "update", updates[stage]),
                ("weights in", "fetch", copies[stage]),
            ):
                if seconds:
                    lanes[lane].append((begin, begin + seconds, kind))
                    begin += seconds
            fetched = ready = begin
        begin = max(computed, ready)
        computed = begin + computing[2 * stage + (not forward)] / plan.num_micro_batches
        lanes["compute"].append((begin, computed, "compute"))
    last = max((end for bars in lanes.values() for _, end, _ in bars), default=0.0)
    scale = prediction.step_s / last if last else 1.0
    return {lane: [(b * scale, e * scale, kind) for b, e, kind in bars] for lane, bars in lanes.items()}


def _work(plan: Plan) -> list[tuple[float, float]]:
    """Return the relative work of each stage, forward and backward. Other work counts like 8 FLOPs a byte."""
    found = []
    for cost, policy in zip(plan.trace.costs, plan.activations, strict=True):
        others = 8.0 * (cost.saved_bytes + cost.transient_bytes)
        forward = cost.flops + others / 3
        backward = cost.backward_flops + 2 * others / 3
        found.append((forward, backward + (forward if policy.is_recomputed else 0.0)))
    return found


def _divided(seconds: float, work: Sequence[float]) -> list[float]:
    """Divide seconds in proportion to the work."""
    whole = sum(work)
    return [seconds * each / whole if whole else 0.0 for each in work]
