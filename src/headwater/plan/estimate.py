"""Estimated dry runs of any micro-batch size: the cost of a stage grows linearly with the samples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

from headwater.plan.options import TraceFor
from headwater.plan.step_trace import Trace

_SMALLER, _LARGER = 2, 4


def estimated_traces(trace_for: TraceFor, *, made: Collection[int] = ()) -> TraceFor:
    """Return dry runs of any size, extrapolated from those of two and four samples.

    An estimate cannot start from a batch of one sample: torch makes fewer copies there, because a
    transposed tensor of one sample is contiguous.

    Args:
        trace_for: number of samples -> its dry run.
        made: sizes whose dry runs have been made, so that they need no estimate.
    """

    @functools.cache
    def estimate(size: int) -> Trace:
        if size in made or size in (1, _SMALLER):
            return trace_for(size)
        two, four = trace_for(_SMALLER), trace_for(_LARGER)
        if size == _LARGER:
            return four
        costs = tuple(_at(size, first, second) for first, second in zip(two.costs, four.costs, strict=True))
        return dataclasses.replace(two, costs=costs, micro_batch_size=size)

    return estimate


def _at(size: int, smaller: Any, larger: Any) -> Any:
    """Return a cost, or one of its numbers, for `size` samples, given those of two and four samples."""
    if isinstance(smaller, bool):
        return smaller
    if isinstance(smaller, int):
        # The result is at least 0: more samples may need less scratch memory, if torch takes another kernel.
        return max(0, smaller + (size - _SMALLER) * (larger - smaller) // (_LARGER - _SMALLER))
    grown = {name: _at(size, count, getattr(larger, name)) for name, count in vars(smaller).items()}
    return dataclasses.replace(smaller, **grown)
