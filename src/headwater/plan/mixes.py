"""Plans that differ in which stages are in device memory, in host memory and on disk."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Literal

from headwater.plan.footprint import Footprint
from headwater.plan.types import Budgets, Plan

_Kind = Literal["device", "host", "disk"]

_PARTS = 8
"""The numbers of stages in device memory that are tried differ by 1/8 of all stages, so that they are few."""


def filled_memory(footprint: Footprint, plan: Plan, budgets: Budgets) -> list[Plan]:
    """Return `plan` with as many stages of its disk tier in host memory as fit, if it fits at all."""
    mixes = _mixes_in_memory(footprint, plan)
    return mixes[: _fitting(footprint, mixes, "host", budgets.host_memory)][-1:]


def smallest_in_memory(footprint: Footprint, plan: Plan, budgets: Budgets) -> list[Plan]:
    """Return the variants of `plan`, which has a disk tier, that exceed the budget of one memory least.

    They differ in the number of stages in host memory. The largest number that fits in host memory needs the
    least disk. The smallest number with which the disk has room for the others needs the least host memory.
    """
    mixes = _mixes_in_memory(footprint, plan)
    fewest = _first_within(footprint, mixes, "disk", budgets.disk_bytes)
    return [*filled_memory(footprint, plan, budgets), *mixes[fewest : fewest + 1]]


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


def _mixes_in_memory(footprint: Footprint, plan: Plan) -> list[Plan]:
    """Return `plan`, of the disk tier, with each number of stages in memory: from none to all but one."""
    order = [stage for stage in first_to_memory(footprint) if stage not in plan.on_device]
    # At least one stage stays on disk: otherwise this would be the memory tier.
    return [dataclasses.replace(plan, in_memory=tuple(sorted(order[:count]))) for count in range(len(order))]


def _mixes_on_device(footprint: Footprint, plan: Plan) -> list[Plan]:
    """Return `plan` with each number of stages in device memory, from none to all."""
    order = first_to_memory(footprint)
    return [
        dataclasses.replace(plan, on_device=tuple(sorted(order[:count]))) for count in range(len(order) + 1)
    ]


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


def first_to_memory(footprint: Footprint) -> list[int]:
    """Return the stages in the order in which they move from disk to memory: most saved traffic first.

    Stages that save equally much are ordered so that successive ones are far apart in the model. So the disk
    transfers that remain are spread over the step.
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
