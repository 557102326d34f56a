"""Bytes of activations: on the compute device during a step, and those that are offloaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from headwater.core.units import MIB
from headwater.plan.step_trace import StageCost, Trace
from headwater.plan.types import Activations

OFFLOAD_WINDOW_BYTES = 128 * MIB
"""Maximum bytes of activations that are being moved out at a time; as many may be on their way back."""
OFFLOAD_WRITERS, OFFLOAD_BLOCK_BYTES = 2, 16 * MIB
"""Number of threads that write activations, and the size of the buffer of each."""


def activations_alive(trace: Trace, activations: Sequence[Activations]) -> list[int]:
    """Return the bytes of activations on the device during each use, for forward and backward together.

    Memory is the same in forward and backward: a stage's activations are held from its forward to its
    backward, so both find those of all stages before it. They are counted from the last use of the stage on.
    A stage that is used twice is usually a tied embedding, whose first use keeps almost nothing.

    Args:
        trace: the dry run of one micro-batch.
        activations: policy of each stage.
    """
    if trace.inference:
        return [trace.costs[stage].transient_bytes for stage in trace.uses]
    num_uses = Counter(trace.uses)
    held, away, busy = [], [], []
    for position, stage in enumerate(trace.uses):
        cost, policy, is_last = trace.costs[stage], activations[stage], trace.last_use[stage] == position
        block = _recomputed_block(trace, stage, policy)
        # A block that runs again keeps only the input of the whole block.
        held.append(_held(cost, policy) if is_last and block in (None, stage) else 0)
        away.append(offloaded_bytes(cost, policy) if is_last else 0)
        if block is None:
            busy.append(_busy(cost, policy, num_uses[stage]))
        else:  # the whole block has run again, and keeps its activations until its backward ends
            inside = (trace.costs[member] for member in trace.members[block])
            busy.append(_passing(cost) + sum(map(_kept, inside)))
    moments = zip(accumulate(held), accumulate(away), busy, strict=True)
    return [kept + _moving(moved) + working for kept, moved, working in moments]


def all_offloaded_bytes(trace: Trace, activations: Sequence[Activations]) -> int:
    """Return the bytes of all stages' activations that one micro-batch moves off the compute device.

    Args:
        trace: the dry run of one micro-batch.
        activations: policy of each stage.
    """
    pairs = zip(trace.costs, activations, strict=True)
    return sum(offloaded_bytes(cost, policy) for cost, policy in pairs)


def offloaded_bytes(cost: StageCost, policy: Activations) -> int:
    """Return the bytes of one stage's activations that a micro-batch moves off the compute device."""
    if policy is Activations.RECOMPUTE_FROM_HOST:
        return cost.input_bytes
    return _kept(cost) if policy is Activations.OFFLOAD else 0


def recomputable(trace: Trace) -> list[bool]:
    """Return for each stage whether it can be recomputed.

    The stage must save tensors, and only its own module may read its weights. A divided block is recomputed
    as a whole or not at all; any module inside it may read its weights.
    """
    elsewhere = {
        stage
        for site, stages in trace.sites.items()
        for stage in stages
        if not _is_within(site, stage, trace)
    }
    can_be = [
        cost.recomputable and cost.saved_bytes > 0 and stage not in elsewhere
        for stage, cost in enumerate(trace.costs)
    ]
    for members in trace.members.values():
        whole = any(trace.costs[stage].saved_bytes for stage in members) and all(
            trace.costs[stage].recomputable and stage not in elsewhere for stage in members
        )
        for stage in members:
            can_be[stage] = whole
    return can_be


def _recomputed_block(trace: Trace, stage: int, policy: Activations) -> int | None:
    """Return the divided block that is recomputed with this stage, or `None`."""
    block = trace.blocks[stage]
    return block if policy.is_recomputed and block in trace.members else None


def _is_within(site: str, stage: int, trace: Trace) -> bool:
    """True if a module is that of a stage, or, for a stage of a divided block, a module inside the block."""
    block = trace.blocks[stage]
    name = trace.stages[block].name
    return site == name or (block in trace.members and site.startswith(f"{name}." if name else ""))


def _kept(cost: StageCost) -> int:
    """Return the bytes that a stage keeps for its backward, if it is not recomputed."""
    return cost.saved_bytes + cost.input_bytes


def _held(cost: StageCost, policy: Activations) -> int:
    """Return the bytes of a stage's activations that stay on the compute device from forward to backward."""
    if policy is Activations.KEEP:
        return _kept(cost)
    if policy is Activations.SELECTIVE:
        return _kept(cost) - cost.cheap_bytes
    return cost.input_bytes if policy is Activations.RECOMPUTE else 0


def _moving(moved: int) -> int:
    """Return the most bytes that are in transit or in a writer's buffer if `moved` bytes are offloaded."""
    return min(moved, OFFLOAD_WINDOW_BYTES) + OFFLOAD_WRITERS * min(moved, OFFLOAD_BLOCK_BYTES)


def _passing(cost: StageCost) -> int:
    """Return the bytes that each use of a stage needs, whatever its policy: its input, output and scratch."""
    return cost.transient_bytes + cost.input_bytes + cost.output_bytes


def _busy(cost: StageCost, policy: Activations, num_uses: int) -> int:
    """Return the bytes of tensors that exist only during a use, such as the gradients of its outputs."""
    passing = _passing(cost)
    if policy.is_recomputed:
        return passing + cost.saved_bytes // num_uses
    if policy is Activations.SELECTIVE:  # the values of one chain of cheap operators
        return passing + min(cost.transient_bytes, cost.again_bytes // num_uses)
    if policy is Activations.OFFLOAD:  # the activations that one operator's backward has brought back
        return passing + min(cost.transient_bytes, _kept(cost) // num_uses)
    return passing
