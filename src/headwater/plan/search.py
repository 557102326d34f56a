"""Searches the fastest plan within budgets, over tiers, slabs, activations and micro-batch sizes."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from headwater.core.precision import Precision
from headwater.plan.footprint import Footprint, minimum_slabs, recomputable
from headwater.plan.machine import NO_GROUP, GroupMemory
from headwater.plan.options import Fixed, TraceFor
from headwater.plan.predict import Predictor
from headwater.plan.types import (
    WHOLE_STORE,
    Activations,
    Calibration,
    Plan,
    Prediction,
    StoreShare,
    Tier,
    Trace,
    shares_slabs,
)

_SLAB_CHOICES, _RUNGS = slice(0, 12, 4), 6
"""Of plans that keep some stages in memory: the numbers of slabs that are tried, and the number of rungs."""


_FRUGAL_TIME = 1.03
"""Time of a plan with less memory that is chosen for the disk tier, as a multiple of the shortest time."""


_Kind = Literal["device", "host", "disk"]


class Budgets(NamedTuple):
    """Limits in bytes: of device memory, host memory and disk. Fields have the names of the params."""

    device_memory: int
    host_memory: int
    disk_bytes: int


@dataclasses.dataclass(frozen=True)
class Request:
    """Everything that a plan depends on: a `PlanRequest`, with limits of the machine where none were set.

    Attributes:
        budgets: limits of the run.
        disk: folder of the disk tier, if there is one.
        slack_bytes: host memory that a remedy adds to what is needed, since `base_bytes` differs a little
            from one process to the next.
        asked_host: host memory that the user allows; `None` if the user has set no limit.
        group: control groups around the process; a remedy may need larger ones.
        device_tier: False if no stage may be stored in device memory.
    """

    trace_for: TraceFor
    batch_size: int
    precision: Precision
    optimizer_state_bytes: int
    budgets: Budgets
    disk: Path | None
    device: str
    calibration: Calibration | None
    fixed: Fixed
    base_bytes: int
    checkpoints: bool = True
    share: StoreShare = WHOLE_STORE
    ranks: int = 1
    worker_bytes: int = 0
    slack_bytes: int = 0
    asked_host: int | None = None
    group: GroupMemory = NO_GROUP
    device_tier: bool = True

    @property
    def may_use_device_tier(self) -> bool:
        """True if stages may be stored and updated in device memory: one rank computes on an accelerator."""
        alone = self.ranks == 1 and not self.share.sums_stay
        return self.device_tier and alone and self.device != "cpu"

    @property
    def chooses_device_tier(self) -> bool:
        """True if the plan decides how many stages are in device memory, since the user has not."""
        return self.may_use_device_tier and self.fixed.tier is None and self.fixed.stages_on_device is None

    def minimum_slabs(self, trace: Trace, tier: Tier | None) -> int:
        """Return the fewest slabs of a size class with which a step can run."""
        sharers = self.ranks - self.share.store_ranks if shares_slabs(tier, self.device) else 1
        return minimum_slabs(trace, sharers)


def best_plan(request: Request) -> Plan | None:
    """Return the fastest plan that fits, by nominal rates if none were measured; `None` if none fits.

    If the user wants all weights on disk, a plan with fewer slabs that is hardly slower comes first.
    """
    best: Plan | None = None
    for size in micro_batch_sizes(request):
        for plan in candidates(request, size):
            if fits(plan, request) and (best is None or _rank(plan) < _rank(best)):
                best = plan
        if best is not None and _unconstrained(best):
            break  # smaller micro-batches can only be slower
    return None if best is None else _with_whole_masters(_frugal(best, request), request)


def _frugal(best: Plan, request: Request) -> Plan:
    """Return the plan with the fewest slabs among those that take at most 3 % longer than `best`.

    Only for a CPU whose rates were measured, and if the user has asked for the disk tier without a limit of
    host memory: weights are on disk to save memory. Otherwise return `best`. Activations and gradients stay
    where `best` has them: a step that moves them writes more to the disk, and its allocator returns pages,
    which takes time that is not predicted.
    """
    asked = request.fixed.tier == "disk" and request.asked_host is None
    if not asked or request.calibration is None or request.device != "cpu":
        return best
    # The micro-batch size stays: with another one, gradients would be summed in another order.
    size, limit = best.micro_batch_size, _FRUGAL_TIME * _seconds(best)
    plans = (*candidates(request, size), *candidates(request, size, smallest=True))
    return min(
        (
            plan
            for plan in plans
            if (plan.activations, plan.gradient_tier) == (best.activations, best.gradient_tier)
            and fits(plan, request)
            and _seconds(plan) <= limit
        ),
        key=lambda plan: (usage(plan).host_memory, _rank(plan)),
    )


def _seconds(plan: Plan) -> float:
    """Return the predicted seconds of a step."""
    seconds = _predicted(plan).step_s
    assert seconds is not None, "candidates are compared by time"
    return seconds


def _with_whole_masters(plan: Plan, request: Request) -> Plan:
    """Return `plan` with whole fp32 masters if it reads bf16 weights in place and these fit; else `plan`."""
    # Not a dimension of the search: whole masters cost only memory, and are faster wherever they fit.
    bf16_in_place = plan.in_place and plan.precision.name == "bf16" and not plan.trace.inference
    if not bf16_in_place or request.fixed.masters == "split":
        return plan
    trace = plan.trace.with_whole_masters()
    roomier = dataclasses.replace(plan, trace=trace)
    predictor = Predictor(_footprint(trace, request), request.calibration)
    roomier = dataclasses.replace(roomier, prediction=predictor.predict(roomier))
    return roomier if fits(roomier, request) else plan


def usage(plan: Plan) -> Budgets:
    """Return the predicted peak bytes of a plan in each kind of memory."""
    prediction = _predicted(plan)
    return Budgets(prediction.device_bytes, prediction.host_bytes, prediction.disk_bytes)


def fits(plan: Plan, request: Request) -> bool:
    """True if every predicted peak is within its budget."""
    return all(used <= limit for used, limit in zip(usage(plan), request.budgets, strict=True))


def micro_batch_sizes(request: Request) -> list[int]:
    """Return the sizes to try: divisors of the batch size, each at most half of the one before."""
    if request.fixed.micro_batch_size is not None:
        return [request.fixed.micro_batch_size]
    sizes = [request.batch_size]
    while sizes[-1] > 1:
        halved = range(sizes[-1] // 2, 0, -1)
        sizes.append(next(size for size in halved if request.batch_size % size == 0))
    return sizes


def candidates(request: Request, size: int, *, smallest: bool = False) -> Iterator[Plan]:
    """Yield plans with a given micro-batch size and their predictions, even if they do not fit.

    Args:
        request: what to plan for.
        size: the micro-batch size.
        smallest: yield every activation policy with the fewest slabs, instead of those that are fast within
            the budgets. The smallest plans are among these, and those that exceed the fewest budgets.
    """
    trace = request.trace_for(size)
    footprint = _footprint(trace, request)
    predictor = Predictor(footprint, request.calibration)
    for frame in _frames(request, footprint, size):
        ladder = activation_ladder(
            footprint, frame, fixed=None if trace.inference else request.fixed.activations
        )
        for slabs in _slab_counts(request, frame)[: 1 if smallest else None]:
            with_slabs = dataclasses.replace(frame, slabs=slabs)
            steps = range(len(ladder)) if smallest else _promising(footprint, with_slabs, ladder, request)
            for step in steps:
                plan = dataclasses.replace(with_slabs, activations=ladder[step].activations)
                yield dataclasses.replace(plan, prediction=predictor.predict(plan))
        mixes = _small_mixes if smallest else _mixes
        yield from mixes(predictor, frame, ladder, request)
        if request.chooses_device_tier and not trace.inference:
            with_stages_on_device = _few_on_device if smallest else _with_stages_on_device
            yield from with_stages_on_device(predictor, frame, ladder, request)


def _footprint(trace: Trace, request: Request) -> Footprint:
    return Footprint(
        trace,
        optimizer_state_bytes=request.optimizer_state_bytes,
        base_bytes=request.base_bytes,
        checkpoints=request.checkpoints,
        share=request.share,
        ranks=request.ranks,
        worker_bytes=request.worker_bytes,
    )


def _frames(request: Request, footprint: Footprint, size: int) -> Iterator[Plan]:
    """Yield plans that differ in their tiers. Slabs and activations are not decided yet."""
    tiers: tuple[Tier, ...] = ("memory", "disk") if request.disk else ("memory",)
    trace = footprint.trace
    keep = (Activations.KEEP,) * len(trace.stages)
    order = _first_to_memory(footprint)
    on_device = order[: request.fixed.stages_on_device or 0]
    # At least one stage stays on disk: otherwise this would be the memory tier.
    most = max(len(trace.stages) - len(on_device) - 1, 0)
    in_memory = [stage for stage in order if stage not in on_device][
        : min(request.fixed.stages_in_memory or 0, most)
    ]
    gradient_tiers = (request.fixed.gradient_tier,) if request.fixed.gradient_tier else tiers
    for tier in (request.fixed.tier,) if request.fixed.tier else tiers:
        for gradient_tier in ("memory",) if trace.inference else gradient_tiers:
            yield Plan(
                trace=trace,
                precision=request.precision,
                device=request.device,
                tier=tier,
                in_place=request.device == "cpu" and tier == "memory" and request.fixed.num_slabs is None,
                slabs=len(trace.stages),
                activations=keep,
                micro_batch_size=size,
                num_micro_batches=request.batch_size // size,
                gradient_tier=gradient_tier,
                disk=request.disk,
                in_memory=tuple(sorted(in_memory)) if tier == "disk" else (),
                on_device=tuple(sorted(on_device)),
            )


def _slab_counts(request: Request, frame: Plan) -> Sequence[int]:
    """Return the numbers of slabs to try, each about a tenth more than the last, up to one for each stage."""
    if frame.in_place:
        return (frame.slabs,)
    least = request.minimum_slabs(frame.trace, frame.tier)
    if request.fixed.num_slabs is not None:
        return (request.fixed.num_slabs,) if request.fixed.num_slabs >= least else ()
    most = max(Counter(stage.slab_bytes for stage in frame.trace.stages).values())
    counts = [least]
    while counts[-1] < most:
        counts.append(min(most, counts[-1] + max(1, counts[-1] // 10)))
    # The last number means no limit: `_unconstrained` compares it with the number of stages.
    return [*counts[:-1], max(counts[-1], len(frame.trace.stages))]


def _mixes(predictor: Predictor, frame: Plan, ladder: Sequence[Rung], request: Request) -> Iterator[Plan]:
    """Yield plans with some stages in host memory and the others on disk, each with as many as fit there.

    A byte of a stage in memory saves more disk traffic than a byte of a slab: weights, masters and optimizer
    state are all read and written in each step. So there are fewer numbers of slabs to try than without
    stages in memory. Which policies are tried does not depend on the budgets: with a larger budget the same
    plans fit, so no plan gets slower.
    """
    if not _may_mix(frame, request):
        return
    for plan in _some_choices(frame, ladder, request):
        mix = _filled_memory(predictor.footprint, plan, request)
        # Without a stage in memory: `candidates` yields such plans itself.
        if mix is not None and mix.in_memory:
            yield dataclasses.replace(mix, prediction=predictor.predict(mix))


def _small_mixes(
    predictor: Predictor, frame: Plan, ladder: Sequence[Rung], request: Request
) -> Iterator[Plan]:
    """Yield plans with some stages in host memory that exceed only one budget, and that one the least."""
    if not _may_mix(frame, request):
        return
    for plan in _some_choices(frame, ladder, request, fewest=True):
        for mix in _smallest_fillings(predictor.footprint, plan, request):
            if mix.in_memory:
                yield dataclasses.replace(mix, prediction=predictor.predict(mix))


def _may_mix(frame: Plan, request: Request) -> bool:
    """True if the plan decides which stages of the disk tier stay in host memory."""
    return frame.tier == "disk" and not frame.trace.inference and request.fixed.tier is None


def _some_choices(
    frame: Plan, ladder: Sequence[Rung], request: Request, *, fewest: bool = False
) -> Iterator[Plan]:
    """Yield plans with some of the numbers of slabs, or the fewest, and some of the activation policies."""
    for slabs in _slab_counts(request, frame)[slice(1) if fewest else _SLAB_CHOICES]:
        # The last rung needs the least memory, and the stride may skip it.
        for rung in [*ladder[:: -(-len(ladder) // _RUNGS)], ladder[-1]]:
            yield dataclasses.replace(frame, slabs=slabs, activations=rung.activations)


def _filled_memory(footprint: Footprint, plan: Plan, request: Request) -> Plan | None:
    """Return `plan` with as many stages of its disk tier in host memory as fit; `None` if it does not fit."""
    mixes = _mixes_in_memory(footprint, plan)
    fitting = _fitting(footprint, mixes, "host", request.budgets.host_memory)
    return mixes[fitting - 1] if fitting else None


def _smallest_fillings(footprint: Footprint, plan: Plan, request: Request) -> list[Plan]:
    """Return `plan` with the stages in memory that need the least disk, and those that need the least memory.

    The first has as many stages in memory as fit there, the second as few as the disk allows.
    """
    filled = _filled_memory(footprint, plan, request)
    mixes = _mixes_in_memory(footprint, plan)
    fewest = mixes[_first_within(footprint, mixes, "disk", request.budgets.disk_bytes) :][:1]
    return [*([] if filled is None else [filled]), *fewest]


def _mixes_in_memory(footprint: Footprint, plan: Plan) -> list[Plan]:
    """Return `plan`, of the disk tier, with each number of stages in memory: from none to all but one."""
    order = [stage for stage in _first_to_memory(footprint) if stage not in plan.on_device]
    # At least one stage stays on disk: otherwise this would be the memory tier.
    return [dataclasses.replace(plan, in_memory=tuple(sorted(order[:count]))) for count in range(len(order))]


def _with_stages_on_device(
    predictor: Predictor, frame: Plan, ladder: Sequence[Rung], request: Request
) -> Iterator[Plan]:
    """Yield plans with as many stages in device memory as fit beside the rest of a step, or fewer.

    The others are in host memory, or in host memory and on disk. Fewer are faster where the host updates the
    others while the device computes.
    """
    footprint = predictor.footprint
    for plan in _some_choices(frame, ladder, request):
        mixes = _mixes_on_device(footprint, plan)
        fitting = _fitting(footprint, mixes, "device", request.budgets.device_memory)
        counts = {*(len(mixes) * part // 4 for part in range(1, 4)), fitting - 1}
        for count in sorted(counts & set(range(1, fitting))):
            mix: Plan | None = mixes[count]
            if frame.tier == "disk":
                mix = _filled_memory(footprint, mixes[count], request)
            if mix is not None:
                yield dataclasses.replace(mix, prediction=predictor.predict(mix))


def _few_on_device(
    predictor: Predictor, frame: Plan, ladder: Sequence[Rung], request: Request
) -> Iterator[Plan]:
    """Yield plans with stages in device memory that exceed only one budget, and that one the least."""
    footprint, budgets = predictor.footprint, request.budgets

    def fillings(mix: Plan) -> list[Plan]:
        return _smallest_fillings(footprint, mix, request) if frame.tier == "disk" else [mix]

    def others_fit(mix: Plan) -> bool:
        return any(
            _used(footprint, filled, "host") <= budgets.host_memory
            and _used(footprint, filled, "disk") <= budgets.disk_bytes
            for filled in fillings(mix)
        )

    for plan in _some_choices(frame, ladder, request, fewest=True):
        mixes = _mixes_on_device(footprint, plan)
        most = _fitting(footprint, mixes, "device", budgets.device_memory) - 1
        fewest = bisect_left(mixes, x=True, key=others_fit)
        # The first stages on the device may need more host memory, for copies of them in checkpoints, and
        # less device memory, since they have no slab. Only from the third on does each need less of the host.
        for count in sorted({1, 2, fewest, most} & set(range(1, len(mixes)))):
            for mix in fillings(mixes[count]):
                yield dataclasses.replace(mix, prediction=predictor.predict(mix))


def _mixes_on_device(footprint: Footprint, plan: Plan) -> list[Plan]:
    """Return `plan` with each number of stages in device memory, from none to all."""
    order = _first_to_memory(footprint)
    return [
        dataclasses.replace(plan, on_device=tuple(sorted(order[:count]))) for count in range(len(order) + 1)
    ]


def _fitting(footprint: Footprint, mixes: Sequence[Plan], kind: _Kind, limit: int) -> int:
    """Return how many of these plans, each of which needs more of a kind of memory, fit within a limit."""
    return bisect_right(mixes, limit, key=lambda mix: _used(footprint, mix, kind))


def _first_within(footprint: Footprint, mixes: Sequence[Plan], kind: _Kind, limit: int) -> int:
    """Return the index of the first of these plans, each of which needs less, that fits; or their number."""
    return bisect_left(mixes, -limit, key=lambda mix: -_used(footprint, mix, kind))


def _used(footprint: Footprint, plan: Plan, kind: _Kind) -> int:
    """Return the peak bytes of a plan in a kind of memory."""
    return sum(getattr(footprint.memory(plan), kind).values())


def _first_to_memory(footprint: Footprint) -> list[int]:
    """Return the stages in the order in which they move from disk to memory: most saved traffic first.

    Stages that save equally much follow each other at large distances, so that the disk transfers that remain
    are spread over the step.
    """

    def saved(stage: int) -> float:
        held = footprint.stages[stage]
        # Forward and backward each read the weights; an update reads and writes everything.
        moved = 2 * held.slab + (held.slab + 2 * held.state if held.trained else 0)
        # Rounded, so that stages that differ by a few bytes count as equal and are spread.
        return round(moved / held.stored, 3) if held.stored else 0.0

    return sorted(range(len(footprint.stages)), key=lambda stage: (-saved(stage), _spread(stage)))


def _spread(number: int) -> float:
    """Return a place between 0 and 1, far from the places of smaller numbers: the van der Corput sequence."""
    place, weight = 0.0, 0.5
    while number:
        place += weight * (number % 2)
        number, weight = number // 2, weight / 2
    return place


class Rung(NamedTuple):
    """An activation policy for each stage, and the peak bytes of activations and gradients of all stages."""

    activations: tuple[Activations, ...]
    peak_bytes: int


def activation_ladder(footprint: Footprint, frame: Plan, *, fixed: Activations | None = None) -> list[Rung]:
    """Return choices of a policy for each stage; each needs less memory than the one before, and more time.

    Stages are recomputed one after the other, those first that free the most bytes for a FLOP. Stages that
    cannot be recomputed are offloaded next, and finally all stages.
    """
    ladder: list[Rung] = []
    for activations in _policies(frame) if fixed is None else (_uniform(frame.trace, fixed),):
        peak = footprint.peak(dataclasses.replace(frame, activations=activations)).total
        # `_promising` bisects the ladder, so the peaks must fall.
        if not ladder or peak < ladder[-1].peak_bytes:
            ladder.append(Rung(activations, peak))
    return ladder


def _policies(frame: Plan) -> Iterator[tuple[Activations, ...]]:
    costs = frame.trace.costs
    policies = [Activations.KEEP] * len(costs)
    yield tuple(policies)
    if frame.trace.inference:  # nothing is saved
        return
    worth = [stage for stage, can_be in enumerate(recomputable(frame.trace)) if can_be]
    # Among equal stages the earliest comes first: recomputing the last ones frees nothing at the turn from
    # forward to backward, when memory use is highest.
    blocks, members = frame.trace.blocks, frame.trace.members

    def flops_per_byte(block: int) -> float:
        whole = [costs[stage] for stage in members.get(block, (block,))]
        return sum(cost.flops for cost in whole) / sum(cost.saved_bytes for cost in whole)

    for block in sorted({blocks[stage] for stage in worth}, key=lambda block: (flops_per_byte(block), block)):
        for stage in members.get(block, (block,)):
            policies[stage] = Activations.RECOMPUTE
        yield tuple(policies)
    if frame.device != "cpu" or frame.disk is not None:
        for stage in set(range(len(costs))) - set(worth):
            policies[stage] = Activations.OFFLOAD
        yield tuple(policies)
        # On a CPU the plans of models without divided blocks stay as they were.
        if members or frame.device != "cpu":
            # Parts of a divided block have no inputs that wait; those of the block belong to its own stage.
            for block in {blocks[stage] for stage in worth}:
                policies[block] = Activations.RECOMPUTE_FROM_HOST
            yield tuple(policies)
        yield (Activations.OFFLOAD,) * len(costs)


def _uniform(trace: Trace, policy: Activations) -> tuple[Activations, ...]:
    """Return `policy` for every stage. A stage that cannot be recomputed keeps its activations instead."""
    if policy is Activations.RECOMPUTE:
        return tuple(policy if can_be else Activations.KEEP for can_be in recomputable(trace))
    return (policy,) * len(trace.stages)


def _promising(footprint: Footprint, frame: Plan, ladder: Sequence[Rung], request: Request) -> list[int]:
    """Return the indices of the rungs that may be best: the first rung that fits, and the last one."""
    memory = footprint.memory(dataclasses.replace(frame, activations=ladder[0].activations))
    used, limit = memory.device, request.budgets.device_memory
    if request.device == "cpu":
        used, limit = memory.host, request.budgets.host_memory
    room = limit - sum(used.values()) + ladder[0].peak_bytes
    first = bisect_left(ladder, -room, key=lambda rung: -rung.peak_bytes)
    return sorted({min(first, len(ladder) - 1), len(ladder) - 1})


def _rank(plan: Plan) -> tuple[float, ...]:
    """Return a sort key: the shortest step first, then the least work, then the least memory."""
    prediction = _predicted(plan)
    work = sum(seconds for name, seconds in prediction.step_parts.items() if name != "overlap")
    return _seconds(plan), work, *usage(plan)


def _unconstrained(plan: Plan) -> bool:
    """True if no budget has slowed this plan down."""
    kept = set(plan.activations) == {Activations.KEEP}
    whole = len(plan.trace.stages)
    in_memory = plan.tier == plan.gradient_tier == "memory" and plan.slabs >= whole
    return kept and (in_memory or len(plan.on_device) == whole)


def _predicted(plan: Plan) -> Prediction:
    assert plan.prediction is not None, "candidates are predicted"
    return plan.prediction
