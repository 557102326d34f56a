"""The search for the fastest plan within budgets: over tiers, slabs, activations and micro-batch sizes."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headwater.plan.footprint import Footprint
from headwater.plan.ladder import Rung, activation_ladder, uniform
from headwater.plan.machine import NO_GROUP, WORKER_BYTES, GroupMemory
from headwater.plan.memory.process import OTHER_MOMENTS
from headwater.plan.memory.stages import counted_bytes, stages_of
from headwater.plan.mixes import filled_device, filled_memory, smallest_in_memory, smallest_on_device
from headwater.plan.options import PlanRequest
from headwater.plan.predict import Predictor
from headwater.plan.step_trace import Trace
from headwater.plan.types import Activations, Blocks, Budgets, Plan, Tier

_SLAB_CHOICES, _RUNGS = slice(0, 12, 4), 6
"""For plans with some stages in memory: which numbers of slabs are tried, and how many rungs."""


_FRUGAL_TIME = 1.03
"""With the disk tier, a plan may take this multiple of the shortest time if it needs less memory."""


@dataclasses.dataclass(frozen=True)
class LimitedRequest:
    """A request for a plan, with limits of the machine where the user has set none.

    Attributes:
        asked: the request.
        budgets: limits of the run.
        slack_bytes: host memory that a remedy adds to the bytes that are needed, because `asked.base_bytes`
            differs a little between processes.
        group: control groups around the process; a remedy may need larger ones.
        ranges: True if tensors have their memory in ranges that grow; see `Plan.ranges`.
    """

    asked: PlanRequest
    budgets: Budgets
    slack_bytes: int = 0
    group: GroupMemory = NO_GROUP
    ranges: bool = False

    def asking(self, **changes: Any) -> LimitedRequest:
        """Return this request with other fields of `asked`."""
        return dataclasses.replace(self, asked=dataclasses.replace(self.asked, **changes))


def best_plan(request: LimitedRequest) -> Plan | None:
    """Return the fastest plan that fits, by nominal rates if none were measured; `None` if none fits.

    If the user wants all weights on disk, a plan that needs less memory is preferred if it is hardly slower.
    """
    best: Plan | None = None
    for size in request.asked.micro_batch_sizes():
        for plan in candidates(request, size):
            if fits(plan, request) and (best is None or _rank(plan) < _rank(best)):
                best = plan
        if best is not None and _unconstrained(best):
            break  # smaller micro-batches can only be slower
    return None if best is None else _frugal(best, request)


def _frugal(best: Plan, request: LimitedRequest) -> Plan:
    """Return the plan with the least host memory among those that take at most 3 % longer than `best`.

    Other plans are considered only for a CPU whose rates were measured, and only if the user has asked for
    the disk tier without a limit of host memory: then weights are on disk to save memory. Otherwise the
    result is `best`. The plans differ in the number of slabs, and in whether cheap operators are computed
    again. They do not move gradients or activations to the disk, since a step would then write more.
    """
    asked = request.asked
    saves_memory = asked.fixed.tier == "disk" and asked.resources.host_memory is None
    if not saves_memory or asked.calibration is None or asked.device != "cpu":
        return best
    # The micro-batch size stays: with another one, gradients would be summed in another order.
    size, limit = best.micro_batch_size, _FRUGAL_TIME * _seconds(best)
    requests = {best.activations: request}
    # Unless tensors have ranges of memory, a run that computes values again gets new pages for each of them.
    # In a user's loop, functions that the user has compiled would run eagerly.
    may_select = asked.fixed.activations is None and best.ranges and not asked.user_loop
    if may_select and set(best.activations) == {Activations.KEEP}:
        selective = dataclasses.replace(asked.fixed, activations=Activations.SELECTIVE)
        requests[uniform(best.trace, Activations.SELECTIVE)] = request.asking(fixed=selective)
    return min(
        (
            plan
            for activations, similar in requests.items()
            for smallest in (False, True)
            for plan in candidates(similar, size, smallest=smallest)
            if (plan.activations, plan.gradient_tier) == (activations, best.gradient_tier)
            and fits(plan, request)
            and _seconds(plan) <= limit
        ),
        key=lambda plan: (usage(plan).host_memory, _rank(plan)),
    )


def _seconds(plan: Plan) -> float:
    """Return the predicted seconds of a step."""
    seconds = plan.predicted.step_s
    assert seconds is not None, "candidates are compared by time"
    return seconds


def usage(plan: Plan) -> Budgets:
    """Return the predicted peak bytes of a plan in each kind of memory."""
    prediction = plan.predicted
    return Budgets(prediction.device_bytes, prediction.host_bytes, prediction.disk_bytes)


def fits(plan: Plan, request: LimitedRequest) -> bool:
    """True if every predicted peak is within its budget."""
    return all(used <= limit for used, limit in zip(usage(plan), request.budgets, strict=True))


def has_room_for_store(request: LimitedRequest) -> bool:
    """True if all budgets together have room for the weight store, whatever the tiers of its stages."""
    asked, budgets = request.asked, request.budgets
    trace = asked.trace_for(asked.micro_batch_sizes()[-1])
    stored = counted_bytes(stages_of(trace, asked.optimizer_state_bytes), asked.share)
    on_disk = budgets.disk_bytes if asked.resources.disk is not None else 0
    on_device = budgets.device_memory if asked.may_use_device_tier else 0
    return stored <= budgets.host_memory + on_disk + on_device


def candidates(
    request: LimitedRequest, size: int, *, smallest: bool = False, every_policy: bool = True
) -> Iterator[Plan]:
    """Yield plans with a given micro-batch size and their predictions, even if they do not fit.

    Args:
        request: what to plan for.
        size: the micro-batch size.
        smallest: yield every activation policy with the fewest slabs, instead of those that are fast within
            the budgets. The smallest plans are among these, and those that exceed the fewest budgets.
        every_policy: False to leave out the activation policies for which there is a smaller plan.
    """
    asked = request.asked
    trace = asked.trace_for(size)
    footprint = _footprint(trace, asked)
    predictor = Predictor(footprint, asked.calibration)
    budgets = request.budgets
    for frame in _frames(request, footprint, size):
        ladder = activation_ladder(
            footprint,
            frame,
            fixed=None if trace.inference else asked.fixed.activations,
            smallest=not every_policy,
            compiled=asked.fixed.compiled,
        )
        for slabs in _slab_counts(asked, frame)[: 1 if smallest else None]:
            with_slabs = dataclasses.replace(frame, slabs=slabs)
            steps = range(len(ladder)) if smallest else _promising(footprint, with_slabs, ladder, budgets)
            for step in steps:
                plan = dataclasses.replace(with_slabs, activations=ladder[step].activations)
                yield dataclasses.replace(plan, prediction=predictor.predict(plan))
        yield from _mixes(predictor, frame, ladder, request, smallest=smallest)


def _footprint(trace: Trace, asked: PlanRequest) -> Footprint:
    share = asked.share
    if asked.fixed.updates == "in_backward" and not trace.inference:
        # An update in backward has no slab: a stage on disk is read for it, and again for the next forward.
        share = dataclasses.replace(share, images=share.images + 1)
    return Footprint(
        trace,
        optimizer_state_bytes=asked.optimizer_state_bytes,
        update_kind=asked.update_kind,
        base_bytes=asked.base_bytes or 0,
        checkpoints=asked.checkpoints,
        share=share,
        ranks=asked.ranks,
        process=dataclasses.replace(asked.process, workers=asked.data_workers * WORKER_BYTES),
    )


def _frames(request: LimitedRequest, footprint: Footprint, size: int) -> Iterator[Plan]:
    """Yield plans that differ in their tiers. Slabs and activations are not decided yet."""
    asked, fixed, trace = request.asked, request.asked.fixed, footprint.trace
    disk = asked.resources.disk
    tiers: tuple[Tier, ...] = ("memory", "disk") if disk else ("memory",)
    keep = (Activations.KEEP,) * len(trace.stages)
    order = footprint.first_to_memory
    on_device = order[: fixed.stages_on_device or 0]
    # At least one stage stays on disk: otherwise this would be the memory tier.
    most = max(len(trace.stages) - len(on_device) - 1, 0)
    in_memory = [stage for stage in order if stage not in on_device][: min(fixed.stages_in_memory or 0, most)]
    gradient_tiers = (fixed.gradient_tier,) if fixed.gradient_tier else tiers
    for tier in (fixed.tier,) if fixed.tier else tiers:
        for gradient_tier in ("memory",) if trace.inference else gradient_tiers:
            yield Plan(
                trace=trace,
                precision=asked.precision,
                device=asked.device,
                tier=tier,
                in_place=asked.device == "cpu" and tier == "memory" and fixed.num_slabs is None,
                slabs=len(trace.stages),
                activations=keep,
                micro_batch_size=size,
                num_micro_batches=asked.batch_size // size,
                gradient_tier=gradient_tier,
                disk=disk,
                in_memory=tuple(sorted(in_memory)) if tier == "disk" else (),
                on_device=tuple(sorted(on_device)),
                blocks=Blocks(fixed.compiled),
                updates="on_fetch" if trace.inference else fixed.updates,
                ranges=request.ranges,
                user_loop=asked.user_loop,
                kernels=asked.kernels,
            )


def _slab_counts(asked: PlanRequest, frame: Plan) -> Sequence[int]:
    """Return the numbers of slabs to try, each about a tenth more than the last, up to one for each stage."""
    if frame.in_place:
        return (frame.slabs,)
    least = asked.minimum_slabs(frame.trace, frame.tier)
    if asked.fixed.num_slabs is not None:
        return (asked.fixed.num_slabs,) if asked.fixed.num_slabs >= least else ()
    most = max(Counter(stage.slab_bytes for stage in frame.trace.stages).values())
    counts = [least]
    while counts[-1] < most:
        counts.append(min(most, counts[-1] + max(1, counts[-1] // 10)))
    # The last number means no limit: `_unconstrained` compares it with the number of stages.
    return [*counts[:-1], max(counts[-1], len(frame.trace.stages))]


def _mixes(
    predictor: Predictor, frame: Plan, ladder: Sequence[Rung], request: LimitedRequest, *, smallest: bool
) -> Iterator[Plan]:
    """Yield plans with some stages in device memory, in host memory and on disk.

    A byte of a stage in memory saves more disk traffic than a byte of a slab: weights, masters and optimizer
    state are all read and written in each step. So there are fewer numbers of slabs to try than without
    stages in memory. Which policies are tried does not depend on the budgets: with a larger budget the same
    plans fit, so no plan gets slower.

    Args:
        predictor: the predictor of the trace.
        frame: a plan with the tiers of the stages that are not moved to memory.
        ladder: the activation policies.
        request: what to plan for.
        smallest: yield the plans that exceed the budget of one memory least, with the fewest slabs.
    """
    if frame.trace.inference:
        return
    fill: list[Callable[[Footprint, Plan, Budgets], list[Plan]]] = []
    if frame.tier == "disk" and request.asked.fixed.tier is None:
        fill.append(smallest_in_memory if smallest else filled_memory)
    if request.asked.chooses_device_tier:
        fill.append(smallest_on_device if smallest else filled_device)
    for plan in _some_choices(frame, ladder, request.asked, fewest=smallest):
        for mix in (mix for filled in fill for mix in filled(predictor.footprint, plan, request.budgets)):
            if mix != plan:  # `candidates` yields the plan itself
                yield dataclasses.replace(mix, prediction=predictor.predict(mix))


def _some_choices(frame: Plan, ladder: Sequence[Rung], asked: PlanRequest, *, fewest: bool) -> Iterator[Plan]:
    """Yield plans with some of the numbers of slabs, or the fewest, and some of the activation policies."""
    for slabs in _slab_counts(asked, frame)[slice(1) if fewest else _SLAB_CHOICES]:
        # The last rung needs the least memory, and the stride may skip it.
        for rung in [*ladder[:: -(-len(ladder) // _RUNGS)], ladder[-1]]:
            yield dataclasses.replace(frame, slabs=slabs, activations=rung.activations)


def _promising(footprint: Footprint, frame: Plan, ladder: Sequence[Rung], budgets: Budgets) -> list[int]:
    """Return the indices of the rungs that may be best: the first rung that fits, and the last one."""
    memory = footprint.memory(dataclasses.replace(frame, activations=ladder[0].activations))
    used, limit = memory.device, budgets.device_memory
    if frame.device == "cpu":
        used, limit = memory.host, budgets.host_memory
    # The other moments that a plan needs room for do not depend on the rung.
    in_step = sum(used.values()) - sum(used.get(part, 0) for part in OTHER_MOMENTS)
    room = limit - in_step - footprint.held_by_others(frame) + ladder[0].peak_bytes
    first = bisect_left(ladder, -room, key=lambda rung: -rung.peak_bytes)
    return sorted({min(first, len(ladder) - 1), len(ladder) - 1})


def _rank(plan: Plan) -> tuple[float, ...]:
    """Return a sort key: the shortest step first, then the least work, then the least memory."""
    work = sum(seconds for name, seconds in plan.predicted.step_parts.items() if name != "overlap")
    return _seconds(plan), work, *usage(plan)


def _unconstrained(plan: Plan) -> bool:
    """True if no budget has slowed this plan down."""
    kept = set(plan.activations) == {Activations.KEEP}
    whole = len(plan.trace.stages)
    in_memory = plan.tier == plan.gradient_tier == "memory" and plan.slabs >= whole
    return kept and (in_memory or len(plan.on_device) == whole)
