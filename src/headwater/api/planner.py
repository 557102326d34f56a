"""The planner of a compiled model: turns a dry run into a plan, on one rank or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from torch import nn

from headwater.api.backend import Backend
from headwater.api.calls import Call
from headwater.api.compile_reports import CompileReport, ValidateReport
from headwater.api.engines import disk_folder, warn_of_half_products
from headwater.api.without_training import compile_only, validate_only
from headwater.core.file_memory import FILE_PAGES
from headwater.core.patience import notice_if_long
from headwater.core.precision import Precision
from headwater.core.tensor_memory import return_free_memory
from headwater.fabric.fabric import Fabric
from headwater.plan.budget import find_plan, make_plan
from headwater.plan.calibrate import calibrate
from headwater.plan.machine import (
    LATE_BYTES,
    device_budget,
    free_device_bytes,
    resident_bytes,
    warn_of_budgets,
)
from headwater.plan.options import (
    PlanRequest,
    TraceFor,
    device_of,
    fixed_by,
    not_divided,
    resources_of,
)
from headwater.plan.step_trace import Trace
from headwater.plan.types import ONE_MODEL, WHOLE_STORE, Plan, ProcessMemory, StoreShare
from headwater.stream.store_settings import StoreSettings

if TYPE_CHECKING:
    from headwater.api.engine_swap import Predecessor
    from headwater.api.updaters import Updaters


class Planner:
    """Decides how a model is streamed (see `Plan`), so that it fits the memory limits of a backend.

    Args:
        backend: the backend.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def device(self) -> str:
        """The device that computes: `cpu` or `cuda`."""
        return device_of(self._backend.config)

    @property
    def limits_device(self) -> bool:
        """True if the backend limits the memory of the device."""
        return self._backend.config.device_memory is not None

    def stop_early(self, model: nn.Module, call: Call, precision: Precision) -> None:
        """Print the report and end the script, if the backend only compiles or validates.

        Args:
            model: the model, which is not streamed yet.
            call: the arguments of its first call.
            precision: precision of the run.

        Raises:
            SystemExit: after the report, with status 0.
        """
        backend = self._backend
        report: CompileReport | ValidateReport
        # On stderr: a model of thousands of layers takes minutes, and a silent program seems to hang.
        if backend.compile_only:  # which checks the model too
            with notice_if_long("planning the steps"):
                report = compile_only(
                    model,
                    *call,
                    precision=precision,
                    compile_dir=backend.compile_dir,
                    device=self.device,
                    resources=resources_of(backend.config),
                    fixed=fixed_by(backend.config),
                    kernels=backend.config.kernels(precision, self.device, own_loop=True),
                )
        elif backend.validate_only:
            with notice_if_long("checking the model"):
                report = validate_only(model, *call, precision=precision)
        else:
            return
        Console().print(report.render())
        raise SystemExit(0)

    def plan(
        self,
        trace: Trace,
        divided: Iterable[Trace],
        precision: Precision,
        updaters: Updaters,
        fabric: Fabric,
        before: Predecessor | None = None,
        process: ProcessMemory = ONE_MODEL,
    ) -> Plan:
        """Make a plan for the model of a dry run. Every rank returns the same plan.

        A plan whose engine can use the store of the replaced engine is preferred. Otherwise both stores would
        be in memory for a moment.

        Args:
            trace: the dry run.
            divided: dry runs with ever smaller stages, made only if no plan fits.
            precision: precision of the run.
            updaters: the optimizer of each parameter.
            fabric: the ranks that train together.
            before: the engine that is replaced. If the new plan needs another store, both exist for a moment.
            process: memory of this process that belongs to models.
        """
        config = self._backend.config
        disk = disk_folder(config)
        FILE_PAGES.release()  # a model in files needs no memory, but its written pages would count as used

        def make() -> Plan:
            kernels = config.kernels(precision, self.device, own_loop=True)
            warn_of_half_products(self.device, precision, kernels, own_loop=True)
            request = PlanRequest(
                _always(trace),
                divided=lambda: map(_always, divided),
                batch_size=trace.micro_batch_size,
                precision=precision,
                optimizer_state_bytes=updaters.state_bytes(config.optimizer_state, trace.params),
                update_kind=updaters.update_kind_on(self.device),
                resources=resources_of(config),
                device=self.device,
                calibration=calibrate(self.device, disk, kernels=kernels),
                fixed=fixed_by(config, trace.micro_batch_size),
                ranks=fabric.local_size,
                share=_share(fabric),
                device_tier=fabric.size == 1,  # the user's loop may change the weights of one replica only
                user_loop=True,
                kernels=kernels,
                process=process,
            )
            if before is None:
                warn_of_budgets(request.resources, self.device)
                return make_plan(request)
            # malloc may still hold memory of freed tensors, which must not count as used.
            return_free_memory()
            plan = plan_for_store(request, before.plan) if before.may_keep_store else None
            return plan or make_plan(with_second_store(request, before.plan))

        # All ranks use the plan of rank 0, but each host has its own path of the disk folder.
        return dataclasses.replace(fabric.agree(make, Plan), disk=disk)


def plan_for_store(asked: PlanRequest, before: Plan) -> Plan | None:
    """Return the best plan whose engine can use the store of another engine; `None` if no such plan fits.

    Args:
        asked: the step and its limits.
        before: the plan of the other engine, which exists while the new plan is made.
    """
    device, host = before.predicted.device_parts, before.predicted.host_parts
    limits = asked.resources
    if limits.device_memory is None and asked.device != "cpu":
        # The new engine takes over the stages in device memory, and the old slabs are freed before new ones
        # are allocated. So both count as available.
        held = device.get("weight store", 0) + device.get("slabs", 0)
        available = device_budget(free_device_bytes(asked.device) + held)
        limits = dataclasses.replace(limits, device_memory=available)
    # Store and slabs are already resident, and the planner adds those of the plan to `base_bytes`.
    others = resident_bytes() + LATE_BYTES - host.get("weight store", 0) - host.get("slabs", 0)
    plan = find_plan(
        dataclasses.replace(
            asked,
            resources=limits,
            # At least the interpreter: the line above subtracts the whole store, but pages of it that were
            # never touched are not resident.
            base_bytes=max(others, host["interpreter"] // asked.ranks),
            fixed=dataclasses.replace(
                asked.fixed,
                tier=before.tier,
                gradient_tier=before.gradient_tier,
                stages_in_memory=len(before.in_memory),
                stages_on_device=len(before.on_device),
            ),
            divided=not_divided,
        )
    )
    return plan if plan is not None and StoreSettings.of(plan) == StoreSettings.of(before) else None


def with_second_store(asked: PlanRequest, before: Plan) -> PlanRequest:
    """Return the request for an engine with its own store, which is filled while another store exists.

    Without a limit of device memory, the limit is the free memory, which already excludes the other store.

    Args:
        asked: the step and its limits.
        before: the plan of the engine with the other store.
    """
    limit = asked.resources.device_memory
    if before.prediction is None or limit is None:
        return asked
    held = before.prediction.device_parts.get("weight store", 0)
    resources = dataclasses.replace(asked.resources, device_memory=max(limit - held, 0))
    return dataclasses.replace(asked, resources=resources)


def _always(trace: Trace) -> TraceFor:
    return lambda size: trace


def _share(fabric: Fabric) -> StoreShare:
    """Return how the ranks share the weight store: each host has all of it, and each rank reads it."""
    if fabric.size == 1:
        return WHOLE_STORE
    return StoreShare(
        disk_ranks=fabric.local_size,
        images=1,  # updates come before the forward; see `StreamedSteps.apply_updates`
        sums_stay=fabric.num_hosts > 1,
    )
