"""The reason why no plan fits, and the nearest settings with which a plan fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import combinations
from math import ceil
from pathlib import Path
from typing import Any

from headwater.core.errors import DoesNotFitError
from headwater.core.units import GIB, MIB, format_bytes, parse_bytes
from headwater.plan.options import NOT_FIXED
from headwater.plan.search import LimitedRequest, best_plan, candidates, has_room_for_store, usage
from headwater.plan.types import Budgets, Plan

UNLIMITED = 1 << 62

_KEYS = {"disk_bytes": "disk.size"}
"""Keys of the section `backend` for budgets whose names differ from them."""

_LARGE_SHARE = 8
"""A refusal names the largest stage if its weights take at least 1/8 of a budget."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A change to a request with which a plan fits.

    Attributes:
        text: what the user should write.
        request: the changed request.
    """

    text: str
    request: LimitedRequest


def refusal(request: LimitedRequest) -> DoesNotFitError:
    """Return the error if no plan fits: which budgets are too small, and which settings would fit."""
    larger = enough(request)
    shortages = [_shortage(request.budgets, setting.request.budgets) for setting in larger]
    texts = [setting.text for setting in (*larger, *other_settings(request))]
    if request.asked.process.host.held:
        shortages[-1] += ", together with the other models that this process streams"
        texts.append("lower limits for those models, or release them")
    return DoesNotFitError(
        f"the model does not fit: {', or '.join(shortages)}",
        where=_largest_stage(request),
        remedy=f"set {', or '.join(texts)}",
    )


def _largest_stage(request: LimitedRequest) -> str | None:
    """Return the name and the size of the largest stage if it takes a large part of a budget, else `None`."""
    stages = request.asked.trace_for(request.asked.micro_batch_sizes()[-1]).stages
    largest = max(stages, key=lambda stage: stage.slab_bytes)
    if largest.slab_bytes * _LARGE_SHARE < min(request.budgets):
        return None
    return f"largest stage: {largest.name or 'the model'}, {format_bytes(largest.slab_bytes)} of weights"


def _shortage(budgets: Budgets, needed: Budgets) -> str:
    return " and ".join(
        f"{format_bytes(limit)} of {name.removesuffix('_bytes').replace('_', ' ')} where "
        f"{format_bytes(need)} are needed"
        for name, limit, need in zip(Budgets._fields, budgets, needed, strict=True)
        if need != limit
    )


def enough(request: LimitedRequest) -> list[Setting]:
    """Return all ways to make a plan fit by raising the fewest budgets, each as little as possible."""
    needs = _needs(request)
    for count in range(1, len(Budgets._fields) + 1):
        ways = [
            _raised(request, least)
            for names in combinations(Budgets._fields, count)
            if (least := _least(needs, request.budgets, names)) is not None
        ]
        if ways:
            return ways
    raise AssertionError("every model fits without limits")


def _raised(request: LimitedRequest, least: dict[str, int]) -> Setting:
    slack = {"host_memory": request.slack_bytes}
    texts = {name: _rounded_up(used + slack.get(name, 0)) for name, used in least.items()}
    raised = _with_budgets(request, {name: parse_bytes(text) for name, text in texts.items()})
    words = (f"{_KEYS.get(name, name)} {text}" for name, text in texts.items() if name != "host_memory")
    host = _host_words(request, raised.budgets.host_memory) if "host_memory" in least else []
    return Setting(" and ".join((*host, *words)), raised)


def _host_words(request: LimitedRequest, need: int) -> list[str]:
    """Return, as text, the limits to raise for `need` bytes of host memory: control group, budget or both."""
    limit, asked = request.group.limit_for(need), request.asked.resources.host_memory
    words = [] if limit is None else [f"the memory limit of the control group {_rounded_up(limit)}"]
    if limit is None or (asked is not None and asked < need):
        words.append(f"host_memory {_rounded_up(need)}")
    return words


def other_settings(request: LimitedRequest) -> Iterator[Setting]:
    """Yield settings with which a plan fits: without one of the user's decisions, or with a disk tier."""
    # No decision of the planner makes the store smaller. So without room for the store no plan can fit.
    defaults = vars(NOT_FIXED) if has_room_for_store(request) else {}
    for name, default in defaults.items():
        # With `stages_in_memory` no other tier is valid, so the tier alone cannot be left out.
        bound = name == "tier" and request.asked.fixed.stages_in_memory is not None
        if getattr(request.asked.fixed, name) != default and not bound:
            free = _with_fixed(request, name, default)
            plan = best_plan(free)
            if plan is not None:
                yield _without_decision(free, name, plan)
    resources = request.asked.resources
    if resources.disk is None:
        unlimited = _with_budgets(request, {"disk_bytes": UNLIMITED})
        yield _and_disk(unlimited.asking(resources=dataclasses.replace(resources, disk=Path())))


def _and_disk(with_disk: LimitedRequest) -> Setting:
    """Return the setting that adds a disk tier, and raises budgets if the disk tier is not enough."""
    used = _least(_needs(with_disk), with_disk.budgets, ("disk_bytes",))
    if used is not None:
        return Setting(f"disk to a folder with {_rounded_up(used['disk_bytes'])} free", with_disk)
    larger = enough(with_disk)[0]
    return Setting(f"{larger.text} and disk to a folder", larger.request)


def _without_decision(free: LimitedRequest, name: str, plan: Plan) -> Setting:
    """Return the setting that replaces the user's value of a decision by the plan's, or leaves it out."""
    if name == "stages_on_device":
        return _with_most_stages(free, name, len(plan.on_device))
    if name == "stages_in_memory":
        return _with_most_stages(free, name, len(plan.in_memory))
    if name == "tier" and (plan.on_device or plan.in_memory):
        return Setting("tier auto", free)
    # The plan's values of these cannot be written as settings: it has a policy for each stage, and a number
    # of slabs even if it reads in place.
    if name in ("activations", "num_slabs"):
        return _left_out(free, name)
    return Setting(f"{name} {getattr(plan, name)}", _with_fixed(free, name, getattr(plan, name)))


def _left_out(free: LimitedRequest, name: str) -> Setting:
    return Setting(f"no {name}, so that the plan chooses", free)


def _with_most_stages(free: LimitedRequest, name: str, fewest: int) -> Setting:
    """Return the setting with the most stages in a memory for which a plan fits.

    Args:
        free: the request without this decision. A plan fits it.
        name: name of the decision: the number of stages in this memory.
        fewest: the number of these stages in the plan. Fewer may not fit, because the others need memory too.
    """
    if best_plan(_with_fixed(free, name, fewest)) is None:  # a fixed number may choose other stages
        return _left_out(free, name)
    most = len(free.asked.trace_for(free.asked.micro_batch_sizes()[-1]).stages)
    while fewest < most:
        middle = (fewest + most + 1) // 2  # rounded up: the range also shrinks if the middle fits
        if best_plan(_with_fixed(free, name, middle)) is None:
            most = middle - 1
        else:
            fewest = middle
    return Setting(f"{name} {fewest}", _with_fixed(free, name, fewest))


def _needs(request: LimitedRequest) -> list[Budgets]:
    """Return the bytes that the smallest plans need, whether or not they fit the budgets.

    A smaller micro-batch has smaller activations, but several micro-batches may need wider gradients. So the
    smallest plan has either the smallest micro-batch or the whole batch.
    """
    sizes = request.asked.micro_batch_sizes()
    return [
        usage(plan)
        for size in dict.fromkeys((sizes[-1], sizes[0]))
        for plan in candidates(request, size, smallest=True, every_policy=False)
    ]


def _least(needs: list[Budgets], budgets: Budgets, names: tuple[str, ...]) -> dict[str, int] | None:
    """Return the least bytes for the named budgets; `None` if the other budgets are too small."""
    limits = budgets._replace(**dict.fromkeys(names, UNLIMITED))
    fitting = [need for need in needs if all(used <= limit for used, limit in zip(need, limits, strict=True))]
    if not fitting:
        return None
    least = min(tuple(getattr(need, name) for name in names) for need in fitting)
    return dict(zip(names, least, strict=True))


def _with_budgets(request: LimitedRequest, budgets: dict[str, int]) -> LimitedRequest:
    return dataclasses.replace(request, budgets=request.budgets._replace(**budgets))


def _with_fixed(request: LimitedRequest, name: str, value: Any) -> LimitedRequest:
    return request.asking(fixed=dataclasses.replace(request.asked.fixed, **{name: value}))


def _rounded_up(num_bytes: int) -> str:
    """Return a size for a params file that is at least `num_bytes`."""
    unit, name = (GIB, "GiB") if num_bytes >= GIB else (MIB, "MiB")
    hundredths = ceil(num_bytes / unit * 100)
    # Both conversions round, so the text may still stand for a few bytes less.
    while parse_bytes(f"{hundredths / 100:.2f} {name}") < num_bytes:
        hundredths += 1
    return f"{hundredths / 100:.2f} {name}"
