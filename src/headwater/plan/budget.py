"""Turns budgets and a dry run into a plan: `make_plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from headwater.core.errors import ConfigError
from headwater.core.tensor_memory import tensor_ranges_available
from headwater.core.units import MIB, counted
from headwater.plan.estimate import estimated_traces
from headwater.plan.machine import (
    LATE_BYTES,
    WORKER_BYTES,
    free_resources,
    group_memory,
    resident_bytes,
)
from headwater.plan.options import PlanRequest, TraceFor
from headwater.plan.refusal import UNLIMITED, refusal
from headwater.plan.search import Request, best_plan, has_room_for_store, micro_batch_sizes
from headwater.plan.types import Activations, Budgets, Plan, Resources

_SLACK_BYTES = 24 * MIB

_FEW_SIZES = 3
"""If there are more micro-batch sizes than this, their dry runs are first estimated."""


def make_plan(asked: PlanRequest) -> Plan:
    """Return the plan with the shortest predicted step within every budget.

    Args:
        asked: the step and its limits.

    Returns:
        The plan, with its prediction.

    Raises:
        ConfigError: if decisions contradict each other or the batch size.
        DoesNotFitError: if no plan fits.
    """
    request, plan = _search(asked)
    if plan is None:
        sizes = micro_batch_sizes(request)
        # A refusal tries many settings: without estimates each of their sizes would get a dry run.
        made = sizes if len(sizes) <= _FEW_SIZES else ()
        raise refusal(dataclasses.replace(request, trace_for=estimated_traces(request.trace_for, made=made)))
    return plan


def find_plan(asked: PlanRequest) -> Plan | None:
    """Return the plan of `make_plan`, or `None` if no plan fits.

    Raises:
        ConfigError: if decisions contradict each other or the batch size.
    """
    return _search(asked)[1]


def _search(asked: PlanRequest) -> tuple[Request, Plan | None]:
    """Return the request with the limits of the machine, and the best plan, or `None` if no plan fits."""
    check(_with_limits(asked, Resources()))
    # Memory is measured after the first dry run, which loads most of the libraries that a run loads.
    resources = free_resources(asked.resources, asked.device)
    request = dataclasses.replace(
        _with_limits(asked, resources), asked_host=asked.resources.host_memory, group=group_memory()
    )
    if asked.base_bytes is None:
        measured = resident_bytes() + LATE_BYTES
        request = dataclasses.replace(request, base_bytes=measured, slack_bytes=_SLACK_BYTES)
    plan = _fastest(request)
    if plan is None:
        divided = (_as_stored(asked, trace_for) for trace_for in asked.divided())
        request, plan = _with_divided_stages(request, divided)
    if plan is None:
        return request, None
    assert plan.prediction is not None, "the best plan is predicted"
    prediction = plan.prediction
    if request.calibration is None:
        prediction = dataclasses.replace(prediction, step_s=None, step_parts={})
    return request, dataclasses.replace(plan, prediction=prediction, budget=resources)


def _with_limits(asked: PlanRequest, resources: Resources) -> Request:
    """Return `asked` with `resources` as its budgets. A budget that is not set is unlimited."""
    limits = (resources.device_memory, resources.host_memory, resources.disk_bytes)
    return Request(
        trace_for=_as_stored(asked, asked.trace_for),
        batch_size=asked.batch_size,
        precision=asked.precision,
        optimizer_state_bytes=asked.optimizer_state_bytes,
        budgets=Budgets(*(UNLIMITED if limit is None else limit for limit in limits)),
        disk=asked.resources.disk,
        device=asked.device,
        update_kind=asked.update_kind,
        calibration=asked.calibration,
        fixed=asked.fixed,
        base_bytes=asked.base_bytes or 0,
        checkpoints=asked.checkpoints,
        share=asked.share,
        ranks=asked.ranks,
        worker_bytes=asked.data_workers * WORKER_BYTES,
        device_tier=asked.device_tier,
        ranges=_has_ranges(asked),
    )


def _has_ranges(asked: PlanRequest) -> bool:
    """True if CPU tensors of a step have their memory in ranges; see `core/tensor_memory.py`."""
    if asked.device != "cpu":
        return False
    return tensor_ranges_available() if asked.fixed.ranges is None else asked.fixed.ranges


def _as_stored(asked: PlanRequest, trace_for: TraceFor) -> TraceFor:
    """Return the dry runs of a request, with `ParamSpec.bf16_state` set as the request asks for it."""
    return lambda size: trace_for(size).storing(asked.fixed.optimizer_state)


def _fastest(request: Request) -> Plan | None:
    """Return the best plan. Many micro-batch sizes are compared by estimated dry runs.

    The size that an estimate has chosen gets a real dry run and is planned again. If it does not fit then,
    every size gets a dry run.
    """
    if len(micro_batch_sizes(request)) <= _FEW_SIZES:
        return best_plan(request)
    estimate = best_plan(dataclasses.replace(request, trace_for=estimated_traces(request.trace_for)))
    if estimate is None:
        return None
    fixed = dataclasses.replace(request.fixed, micro_batch_size=estimate.micro_batch_size)
    return best_plan(dataclasses.replace(request, fixed=fixed)) or best_plan(request)


def _with_divided_stages(request: Request, divided: Iterable[TraceFor]) -> tuple[Request, Plan | None]:
    """Return the request with the largest stages for which a plan fits, and its plan.

    Args:
        request: a request that no plan fits.
        divided: dry runs with ever smaller stages.

    Returns:
        The request with the smallest stages, and `None`, if no plan fits.
    """
    # Smaller stages have the same bytes. So dry runs and searches would be in vain if the store has no room.
    may_fit = has_room_for_store(request)
    for trace_for in divided:
        request = dataclasses.replace(request, trace_for=trace_for)
        plan = _fastest(request) if may_fit else None
        if plan is not None:
            return request, plan
    return request, None


def check(request: Request) -> None:
    """Raise if the decisions that the user has made contradict each other.

    Raises:
        ConfigError: names the decision.
    """
    fixed = request.fixed
    # First: the check of `num_slabs` makes a dry run of this size.
    _check_micro_batch_size(request)
    for name, tier in {"tier": fixed.tier, "gradient_tier": fixed.gradient_tier}.items():
        if tier == "disk" and request.disk is None:
            raise ConfigError(
                f"{name} is disk, but no disk folder is given", where=name, remedy="set disk to a folder"
            )
    if fixed.activations is Activations.OFFLOAD and request.device == "cpu" and request.disk is None:
        raise ConfigError(
            "on CPU activations are offloaded to disk, but no disk folder is given",
            where="activations",
            remedy="set disk to a folder, or write activations: recompute",
        )
    if fixed.stages_on_device and not request.may_use_device_tier:
        raise ConfigError(
            "expected ranks of one host that compute on GPUs for stages_on_device, "
            f"but {_without_device_tier(request)}",
            where="stages_on_device",
            remedy="leave stages_on_device out",
        )
    least = request.minimum_slabs(request.trace_for(micro_batch_sizes(request)[-1]), fixed.tier)
    if fixed.num_slabs is not None and fixed.num_slabs < least:
        raise ConfigError(
            f"this model needs at least {counted(least, 'slab', 'slabs')}, found {fixed.num_slabs}",
            where="num_slabs",
            remedy=f"write {least} or more, or leave num_slabs out",
        )


def _without_device_tier(request: Request) -> str:
    """Return the reason why no stage can be in device memory."""
    if request.device == "cpu":
        return "the CPU computes"
    if request.share.sums_stay:
        return "there are several hosts"
    return "there are store ranks" if request.share.store_ranks else "several ranks run your own loop"


def _check_micro_batch_size(request: Request) -> None:
    size, batch_size = request.fixed.micro_batch_size, request.batch_size
    if size is not None and (size < 1 or batch_size % size):
        divisors = (n for n in range(1, batch_size + 1) if batch_size % n == 0)
        nearest = min(divisors, key=lambda divisor: abs(divisor - size))
        raise ConfigError(
            f"micro_batch_size {size} does not divide batch_size {batch_size}",
            where="micro_batch_size",
            remedy=f"write for example {nearest}",
        )
