"""Turns budgets and a dry run into a plan: `make_plan`."""

from __future__ import annotations

import dataclasses

from headwater.core.device_memory import let_segments_grow
from headwater.core.errors import ConfigError
from headwater.core.tensor_memory import tensor_ranges_available
from headwater.core.units import MIB, counted
from headwater.plan.estimate import estimated_traces
from headwater.plan.machine import LATE_BYTES, free_resources, group_memory, resident_bytes
from headwater.plan.options import PlanRequest, TraceFor
from headwater.plan.refusal import UNLIMITED, refusal
from headwater.plan.search import LimitedRequest, best_plan, has_room_for_store
from headwater.plan.step_trace import Trace
from headwater.plan.types import Activations, Budgets, Plan

_SLACK_BYTES = 24 * MIB
"""See `LimitedRequest.slack_bytes`. It is added only if the base memory was measured in this process."""

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
        sizes = asked.micro_batch_sizes()
        # A refusal tries many settings. Without estimates, each micro-batch size of them would get a dry run.
        made = sizes if len(sizes) <= _FEW_SIZES else ()
        raise refusal(request.asking(trace_for=estimated_traces(request.asked.trace_for, made=made)))
    return plan


def find_plan(asked: PlanRequest) -> Plan | None:
    """Return the plan of `make_plan`, or `None` if no plan fits.

    Raises:
        ConfigError: if decisions contradict each other or the batch size.
    """
    return _search(asked)[1]


def _search(asked: PlanRequest) -> tuple[LimitedRequest, Plan | None]:
    """Return the request with the limits of the machine, and the best plan, or `None` if no plan fits."""
    asked = _as_stored(asked)
    ranges = _has_ranges(asked)
    check(asked)
    # Memory is measured after the first dry run, which loads most of the libraries that a run loads.
    resources = free_resources(asked.resources, asked.device)
    limits = (resources.device_memory, resources.host_memory, resources.disk_bytes)
    budgets = Budgets(*(UNLIMITED if limit is None else limit for limit in limits))
    request = LimitedRequest(asked, budgets, group=group_memory(), ranges=ranges)
    if asked.base_bytes is None:
        request = request.asking(base_bytes=resident_bytes() + LATE_BYTES)
        request = dataclasses.replace(request, slack_bytes=_SLACK_BYTES)
    plan = _fastest(request)
    if plan is None:
        request, plan = _with_divided_stages(request)
    if plan is None:
        return request, None
    prediction = plan.predicted
    if asked.calibration is None:
        prediction = dataclasses.replace(prediction, step_s=None, step_parts={})
    return request, dataclasses.replace(plan, prediction=prediction, budget=resources)


def _has_ranges(asked: PlanRequest) -> bool:
    """True if the tensors of a step have their memory in ranges; see `Plan.ranges`."""
    if asked.device != "cpu":
        return let_segments_grow()
    return tensor_ranges_available() if asked.fixed.ranges is None else asked.fixed.ranges


def _as_stored(asked: PlanRequest) -> PlanRequest:
    """Return the request with its dry runs changed by what the store keeps of each parameter."""

    def stored(trace_for: TraceFor) -> TraceFor:
        def trace(size: int) -> Trace:
            # `storing` comes first, because `keeping` leaves out no masked elements if the state is in bf16.
            found = trace_for(size).storing(asked.fixed.optimizer_state).keeping(asked.kept)
            return found if found.masks == asked.masks else dataclasses.replace(found, masks=asked.masks)

        return trace

    return asked.with_traces(stored)


def _fastest(request: LimitedRequest) -> Plan | None:
    """Return the best plan. Many micro-batch sizes are compared by estimated dry runs.

    The size that was chosen by an estimate gets a real dry run, and is planned again. If no plan of this size
    fits then, every size gets a real dry run.
    """
    asked = request.asked
    if len(asked.micro_batch_sizes()) <= _FEW_SIZES:
        return best_plan(request)
    estimate = best_plan(request.asking(trace_for=estimated_traces(asked.trace_for)))
    if estimate is None:
        return None
    fixed = dataclasses.replace(asked.fixed, micro_batch_size=estimate.micro_batch_size)
    return best_plan(request.asking(fixed=fixed)) or best_plan(request)


def _with_divided_stages(request: LimitedRequest) -> tuple[LimitedRequest, Plan | None]:
    """Return the request with the largest stages for which a plan fits, and its plan.

    Args:
        request: a request that no plan fits.

    Returns:
        The request with the smallest stages, and `None`, if no plan fits.
    """
    # Smaller stages need as many bytes in the store. If the store has no room, no division can help.
    may_fit = has_room_for_store(request)
    for trace_for in request.asked.divided():
        request = request.asking(trace_for=trace_for)
        plan = _fastest(request) if may_fit else None
        if plan is not None:
            return request, plan
    return request, None


def check(asked: PlanRequest) -> None:
    """Raise if the decisions that the user has made contradict each other, or the model.

    Raises:
        ConfigError: names the decision.
    """
    # This comes first, because the check of `num_slabs` makes a dry run of the micro-batch size.
    check_without_model(asked)
    fixed = asked.fixed
    least = asked.minimum_slabs(asked.trace_for(asked.micro_batch_sizes()[-1]), fixed.tier)
    if fixed.num_slabs is not None and fixed.num_slabs < least:
        raise ConfigError(
            f"this model needs at least {counted(least, 'slab', 'slabs')}, found {fixed.num_slabs}",
            where="num_slabs",
            remedy=f"write {least} or more, or leave num_slabs out",
        )


def check_without_model(asked: PlanRequest) -> None:
    """Raise if the decisions that the user has made contradict each other. No dry run is made.

    Raises:
        ConfigError: names the decision.
    """
    fixed = asked.fixed
    _check_micro_batch_size(asked)
    for name, tier in {"tier": fixed.tier, "gradient_tier": fixed.gradient_tier}.items():
        if tier == "disk" and asked.resources.disk is None:
            raise ConfigError(
                f"{name} is disk, but no disk folder is given",
                where=name,
                remedy="set disk to a folder on a fast disk (--disk, or headwater.backend(disk=FOLDER))",
            )
    if fixed.activations is Activations.OFFLOAD and asked.device == "cpu" and asked.resources.disk is None:
        raise ConfigError(
            "on CPU activations are offloaded to disk, but no disk folder is given",
            where="activations",
            remedy="set disk to a folder, or write activations: recompute",
        )
    if fixed.updates == "in_backward" and asked.share.sums_stay:
        raise ConfigError(
            "updates: in_backward needs the ranks of one host, but there are several hosts",
            where="updates",
            remedy="write updates: on_fetch",
        )
    if fixed.stages_on_device and not asked.may_use_device_tier:
        raise ConfigError(
            "stages_on_device needs ranks of one host that all compute on GPUs, "
            f"but {_without_device_tier(asked)}",
            where="stages_on_device",
            remedy="leave stages_on_device out",
        )


def _without_device_tier(asked: PlanRequest) -> str:
    """Return the reason why no stage can be in device memory."""
    if asked.device == "cpu":
        return "the CPU computes"
    if asked.share.sums_stay:
        return "there are several hosts"
    return "there are store ranks" if asked.share.store_ranks else "several ranks run your own loop"


def _check_micro_batch_size(asked: PlanRequest) -> None:
    size, batch_size = asked.fixed.micro_batch_size, asked.batch_size
    if size is not None and (size < 1 or batch_size % size):
        divisors = (n for n in range(1, batch_size + 1) if batch_size % n == 0)
        nearest = min(divisors, key=lambda divisor: abs(divisor - size))
        raise ConfigError(
            f"micro_batch_size {size} does not divide batch_size {batch_size}",
            where="micro_batch_size",
            remedy=f"write for example {nearest}",
        )
