"""Plans that differ in which stages are in device memory, in host memory and on disk."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Literal, final, overload

from headwater.plan.footprint import Footprint
from headwater.plan.types import Budgets, Plan

_Kind = Literal["device", "host", "disk"]

_PARTS = 8
"""The search tries numbers of stages in device memory in steps of 1/8 of all stages, so that it is fast."""


def filled_memory(footprint: Footprint, plan: Plan, budgets: Budgets) -> list[Plan]:
    """Return `plan` with as many stages of its disk tier in host memory as fit, if it fits at all."""
    mixes = _mixes_in_memory(footprint, plan)
    fitting = _fitting(footprint, mixes, "host", budgets.host_memory)
    return [mixes[fitting - 1]] if fitting else []


def smallest_in_memory(footprint: Footprint, plan: Plan, budgets: Budgets) -> list[Plan]:
    """Return the variants of `plan`, which has a disk tier, that exceed the budget of one memory least.

    They differ in the number of stages in host memory. The largest number that fits in host memory needs the
    least disk. The smallest number with which the disk has room for the others needs the least host memory.
    """
    mixes = _mixes_in_memory(footprint, plan)
    fewest = _first_within(footprint, mixes, "disk", budgets.disk_bytes)
    least = [mixes[fewest]] if fewest < len(mixes) else []
    return [*filled_memory(footprint, plan, budgets), *least]


def filled_device(footprint: Footprint, plan: Plan, budgets: Budgets) -> list[Plan]:
    """Return variants of `plan`: with as many stages in device memory as fit, and with fewer.

    The other stages are in host memory, or in host memory and on disk. Fewer stages in device memory can be
    faster, because the host updates the other stages while the device computes.
    """
    mixes = _mixes_on_device(footprint, plan)
    fitting = _fitting(footprint, mixes, "device", budgets.device_memory)
    counts = {*(len(mixes) * part // _PARTS for part in range(1, _PARTS)), fitting - 1}
    if plan.tier == "memory":
        # The smallest number with which the other stages fit in host memory. More are not always faster.
        counts.add(_first_within(footprint, mixes, "host", budgets.host_memory))
    found = [mixes[count] for count in sorted(counts & set(range(1, fitting)))]
    if plan.tier == "disk":
        found = [filled for mix in found for filled in filled_memory(footprint, mix, budgets)]
    return found


def smallest_on_device(footprint: Footprint, plan: Plan, budgets: Budgets) -> list[Plan]:
    """Return the variants of `plan` that exceed the budget of one memory least.

    They differ in the number of stages in device memory.
    """

    def fillings(mix: Plan) -> list[Plan]:
        return smallest_in_memory(footprint, mix, budgets) if plan.tier == "disk" else [mix]

    def others_fit(mix: Plan) -> bool:
        return any(
            _used(footprint, filled, "host") <= budgets.host_memory
            and _used(footprint, filled, "disk") <= budgets.disk_bytes
            for filled in fillings(mix)
        )

    mixes = _mixes_on_device(footprint, plan)
    most = _fitting(footprint, mixes, "device", budgets.device_memory) - 1
    fewest = bisect_left(mixes, x=True, key=others_fit)
    # The first one or two stages on the device may need more host memory, for their copies in checkpoints,
    # and less device memory, because they have no slab. Each further stage needs less host memory.
    counts = {1, 2, fewest, most} & set(range(1, len(mixes)))
    return [filled for count in sorted(counts) for filled in fillings(mixes[count])]


@final
class _Mixes(Sequence[Plan]):
    """Plans with 0, 1, 2, … stages in one kind of memory.

    A search by bisection looks at few of these plans, so each plan is made when the search asks for it.

    Args:
        make: stages in that memory, in the order of stages -> the plan.
        order: the stages in the order in which they are added.
        length: number of plans.
    """

    def __init__(self, make: Callable[[tuple[int, ...]], Plan], order: Sequence[int], length: int) -> None:
        self._make, self._order, self._length = make, order, length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Plan: ...

    @overload
    def __getitem__(self, index: slice) -> list[Plan]: ...

    def __getitem__(self, index: int | slice) -> Plan | list[Plan]:
        counts = range(self._length)[index]
        if isinstance(counts, range):
            return [self[count] for count in counts]
        return self._make(tuple(sorted(self._order[:counts])))


def _mixes_in_memory(footprint: Footprint, plan: Plan) -> _Mixes:
    """Return variants of a plan with a disk tier: with 0, 1, 2, … stages in host memory, but not all."""
    order = [stage for stage in footprint.first_to_memory if stage not in plan.on_device]
    # At least one stage stays on disk: otherwise this would be the memory tier.
    return _Mixes(lambda stages: dataclasses.replace(plan, in_memory=stages), order, len(order))


def _mixes_on_device(footprint: Footprint, plan: Plan) -> _Mixes:
    """Return variants of `plan` with 0, 1, 2, … stages in device memory, up to all of them."""
    order = footprint.first_to_memory
    return _Mixes(lambda stages: dataclasses.replace(plan, on_device=stages), order, len(order) + 1)


def _fitting(footprint: Footprint, mixes: Sequence[Plan], kind: _Kind, limit: int) -> int:
    """Return how many of these plans fit. Each needs more of this kind of memory than the one before."""
    return bisect_right(mixes, limit, key=lambda mix: _used(footprint, mix, kind))


def _first_within(footprint: Footprint, mixes: Sequence[Plan], kind: _Kind, limit: int) -> int:
    """Return the index of the first of these plans that fits, or their number if none fits.

    Each needs less of this kind of memory than the one before.
    """
    return bisect_left(mixes, -limit, key=lambda mix: -_used(footprint, mix, kind))


def _used(footprint: Footprint, plan: Plan, kind: _Kind) -> int:
    """Return the peak bytes of a plan in a kind of memory."""
    return sum(getattr(footprint.memory(plan), kind).values())
