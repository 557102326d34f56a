"""Bytes of single stages: weights, the rest of the store, and gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from math import ceil

import torch

from headwater.core.stage import ParamSpec, StageSpec
from headwater.plan.step_trace import Trace
from headwater.plan.types import StoreShare
from headwater.store.layout import Encoding, encoding_of, tie_bytes

FP32_BYTES, HALF_BYTES = 4, 2


@dataclasses.dataclass(frozen=True)
class StageBytes:
    """Bytes of one stage, by kind.

    Attributes:
        slab: the weights in wire precision, on the device and in the store.
        state: everything else in the store: the rest of the masters, and optimizer state.
        gradient: gradients as autograd makes them, in wire precision.
        gradient_sum: gradients that wait for the update, if those in 16 bits are summed in fp32.
        trained: number of trained parameters.
        elements: number of them for which the store has optimizer state; see `ParamSpec.kept`.
        has_ties: true if the store rounds ties to even: see [Note: ties to even] in `store/ties.py`.
        values: bytes of the masters in the store.
        moved: bytes that an update in host memory reads and writes, by which its time is predicted.
    """

    slab: int
    state: int
    gradient: int
    gradient_sum: int
    trained: int
    elements: int
    has_ties: bool
    values: int
    moved: int

    @property
    def stored(self) -> int:
        """Bytes in the weight store."""
        return self.slab + self.state


def stages_of(trace: Trace, optimizer_state_bytes: float) -> tuple[StageBytes, ...]:
    """Return the bytes of each stage of a dry run. In inference no parameter is trained.

    Args:
        trace: the dry run.
        optimizer_state_bytes: bytes of optimizer state for each trained parameter.
    """
    return tuple(
        _bytes_of(stage, optimizer_state_bytes, trained=not trace.inference) for stage in trace.stages
    )


def _bytes_of(stage: StageSpec, optimizer_state_bytes: float, *, trained: bool) -> StageBytes:
    updated = [param for param in stage.params if trained and param.requires_grad]
    elements = sum(param.stored_numel for param in updated)
    masters = sum(map(_master_bytes, stage.params))
    state, gradient = ceil(elements * optimizer_state_bytes) + masters, sum(map(_gradient_bytes, updated))
    return StageBytes(
        slab=stage.slab_bytes,
        state=state,
        gradient=gradient,
        values=stage.slab_bytes + masters,
        moved=2 * (stage.slab_bytes + state) + gradient if updated else 0,
        gradient_sum=sum(param.numel * param.sum_dtype(torch.float32).itemsize for param in updated),
        trained=sum(param.numel for param in updated),
        elements=elements,
        has_ties=any(encoding_of(param) is Encoding.EVEN for param in stage.params),
    )


def _master_bytes(param: ParamSpec) -> int:
    """Return the bytes of the master of a parameter beside the wire image."""
    numel = param.stored_numel
    match encoding_of(param):
        case Encoding.SAME:
            return 0
        case Encoding.SPLIT:
            return numel * HALF_BYTES
        case Encoding.EVEN:
            return numel * HALF_BYTES + tie_bytes(numel)
        case Encoding.COPY:
            return numel * FP32_BYTES


def _gradient_bytes(param: ParamSpec) -> int:
    return param.numel * param.gradient_dtype.itemsize


def counted_bytes(stages: Iterable[StageBytes], share: StoreShare) -> int:
    """Return the bytes of some stages in the weight store that count against a rank's budgets.

    Args:
        stages: the stages.
        share: the fractions that count.
    """
    pairs = [(stage.slab, stage.state) for stage in stages]
    wire, state = sum(slab for slab, _ in pairs), sum(state for _, state in pairs)
    return int(share.wire * wire + share.state * state)


def largest_state_of_an_element(stages: Iterable[StageBytes]) -> float:
    """Return the most bytes beside the wire image that one stored element of any stage has; 0 if frozen."""
    return max((stage.state / stage.elements for stage in stages if stage.elements), default=0)


def first_to_memory(stages: Sequence[StageBytes]) -> list[int]:
    """Return the stages in the order in which they move from disk to memory: most saved traffic first.

    Stages that save equally much are ordered so that successive ones are far apart in the model. So the disk
    transfers that remain are spread over the step.
    """

    def saved(stage: int) -> float:
        held = stages[stage]
        # Forward and backward each read the weights; an update reads and writes everything.
        moved = 2 * held.slab + (held.slab + 2 * held.state if held.trained else 0)
        # Rounded, so that stages that differ by a few bytes count as equal and are spread.
        return round(moved / held.stored, 3) if held.stored else 0.0

    return sorted(range(len(stages)), key=lambda stage: (-saved(stage), _spread(stage)))


def _spread(number: int) -> float:
    """Return a place between 0 and 1, far from the places of smaller numbers: the van der Corput sequence."""
    place, weight = 0.0, 0.5
    while number:
        place += weight * (number % 2)
        number, weight = number // 2, weight / 2
    return place
