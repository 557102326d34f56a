"""Activation policies for the stages of a plan, from the fastest to the smallest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from headwater.plan.footprint import Footprint
from headwater.plan.memory.activations import recomputable
from headwater.plan.step_trace import Trace
from headwater.plan.types import Activations, Plan


class Rung(NamedTuple):
    """An activation policy for each stage, and the peak bytes of activations and gradients of all stages."""

    activations: tuple[Activations, ...]
    peak_bytes: int


def activation_ladder(
    footprint: Footprint,
    frame: Plan,
    *,
    fixed: Activations | None = None,
    smallest: bool = False,
    compiled: bool = False,
) -> list[Rung]:
    """Return choices of a policy for each stage; each needs less memory than the one before, and more time.

    First the cheap operators of all stages are computed again (`SELECTIVE`). Then stages are recomputed as a
    whole, one after the other, in the order of the bytes that they free per FLOP. Then stages that cannot be
    recomputed are offloaded, and finally all stages.

    Args:
        footprint: adds up the bytes.
        frame: the plan without activation policies.
        fixed: the policy of all stages, if the user has chosen one. Compiled blocks keep their activations if
            it is selective.
        smallest: leave out a choice if a later one offloads as many bytes, because the later one needs less
            memory of one kind, and not more of any other.
        compiled: true if blocks are compiled, so that no stage is recomputed selectively.
    """
    ladder: list[Rung] = []
    if compiled and fixed is Activations.SELECTIVE:
        fixed = Activations.KEEP
    policies = _policies(frame, selects=not compiled)
    for activations in policies if fixed is None else (uniform(frame.trace, fixed),):
        plan = dataclasses.replace(frame, activations=activations)
        peak = footprint.peak(plan).total
        # `_promising` bisects the ladder, so the peaks must fall.
        if ladder and peak >= ladder[-1].peak_bytes:
            continue
        if smallest and ladder:
            before = dataclasses.replace(frame, activations=ladder[-1].activations)
            if footprint.offloaded_bytes(before) == footprint.offloaded_bytes(plan):
                ladder.pop()
        ladder.append(Rung(activations, peak))
    return ladder


def _policies(frame: Plan, *, selects: bool) -> Iterator[tuple[Activations, ...]]:
    costs = frame.trace.costs
    policies = [Activations.KEEP] * len(costs)
    yield tuple(policies)
    if frame.trace.inference:  # nothing is saved
        return
    selective = uniform(frame.trace, Activations.SELECTIVE)
    if selects and Activations.SELECTIVE in selective:
        policies = list(selective)
        yield selective
    worth = [stage for stage, can_be in enumerate(recomputable(frame.trace)) if can_be]
    # Among equal stages the earliest comes first: recomputing the last ones frees nothing at the turn from
    # forward to backward, when memory use is highest.
    blocks, members = frame.trace.blocks, frame.trace.members

    def flops_per_byte(block: int) -> float:
        whole = [costs[stage] for stage in members.get(block, (block,))]
        return sum(cost.forward.flops for cost in whole) / sum(cost.saved_bytes for cost in whole)

    for block in sorted({blocks[stage] for stage in worth}, key=lambda block: (flops_per_byte(block), block)):
        for stage in members.get(block, (block,)):
            policies[stage] = Activations.RECOMPUTE
        yield tuple(policies)
    if frame.device != "cpu" or frame.disk is not None:
        for stage in set(range(len(costs))) - set(worth):
            policies[stage] = Activations.OFFLOAD
        yield tuple(policies)
        # A plan for a CPU uses this policy only if blocks are divided.
        if members or frame.device != "cpu":
            # Only a block's own stage has inputs that are kept. The parts of a divided block keep none.
            for block in {blocks[stage] for stage in worth}:
                policies[block] = Activations.RECOMPUTE_FROM_HOST
            yield tuple(policies)
        yield (Activations.OFFLOAD,) * len(costs)


def uniform(trace: Trace, policy: Activations) -> tuple[Activations, ...]:
    """Return `policy` for every stage. A stage for which it is not possible keeps its activations instead.

    A divided block is not recomputed selectively: a part would need weights of other parts in its backward.
    If the forward changes weights, no stage is recomputed selectively: backward would use changed weights.
    """
    if policy is Activations.SELECTIVE:
        can_be = [not trace.written and block not in trace.members for block in trace.blocks]
        return tuple(
            policy if cost.cheap_bytes and can else Activations.KEEP
            for cost, can in zip(trace.costs, can_be, strict=True)
        )
    if policy is Activations.RECOMPUTE:
        return tuple(policy if can_be else Activations.KEEP for can_be in recomputable(trace))
    return (policy,) * len(trace.stages)
