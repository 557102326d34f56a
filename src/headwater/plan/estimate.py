"""Estimated dry runs of any micro-batch size: the cost of a stage grows linearly with the samples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection

from headwater.plan.options import TraceFor
from headwater.plan.types import StageCost, Trace

_COUNTS = [field.name for field in dataclasses.fields(StageCost) if field.name != "recomputable"]


def estimated_traces(trace_for: TraceFor, *, made: Collection[int] = ()) -> TraceFor:
    """Return dry runs of any size, extrapolated from those of one and two samples.

    Args:
        trace_for: number of samples -> its dry run.
        made: sizes whose dry runs have been made, so that they need no estimate.
    """

    @functools.cache
    def estimate(size: int) -> Trace:
        if size in made:
            return trace_for(size)
        one = trace_for(1)
        if size == 1:
            return one
        # Only now: a batch of one sample needs no second dry run.
        two = trace_for(2)
        costs = tuple(_at(size, first, second) for first, second in zip(one.costs, two.costs, strict=True))
        return dataclasses.replace(one, costs=costs, micro_batch_size=size)

    return estimate


def _at(size: int, one: StageCost, two: StageCost) -> StageCost:
    counts = {name: (getattr(one, name), getattr(two, name)) for name in _COUNTS}
    # Not below 0: two samples may need less scratch memory than one, if torch takes another kernel.
    grown = {name: max(0, first + (size - 1) * (second - first)) for name, (first, second) in counts.items()}
    return dataclasses.replace(one, **grown)
