"""The planner of a compiled model: turns a dry run into a plan, on one rank or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from torch import nn

from headwater.api.backend import Backend
from headwater.api.calls import Call
from headwater.api.early import EarlyOptions, check
from headwater.api.engines import disk_folder
from headwater.core.patience import noticed
from headwater.core.precision import Precision
from headwater.fabric.fabric import Fabric
from headwater.plan.budget import make_plan
from headwater.plan.calibrate import calibrate
from headwater.plan.options import TraceFor, device_of, fixed_by, request_of, resources_of
from headwater.plan.types import WHOLE_STORE, Plan, Resources, StoreShare, Trace

if TYPE_CHECKING:
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
        if not (backend.compile_only or backend.validate_only):
            return
        options = EarlyOptions(
            compile_only=backend.compile_only,
            validate_only=backend.validate_only,
            compile_dir=backend.compile_dir,
            precision=precision,
            device=self.device,
            resources=resources_of(backend.config),
            fixed=fixed_by(backend.config),
        )
        # On stderr: a model of thousands of layers takes minutes, and a silent program seems to hang.
        with noticed("checking the model" if backend.validate_only else "planning the steps"):
            report = check(model, *call, options)
        assert report is not None, "something was asked for"
        Console().print(report.render())
        raise SystemExit(0)

    def plan(
        self,
        trace: Trace,
        divided: Iterable[Trace],
        precision: Precision,
        updaters: Updaters,
        fabric: Fabric,
        before: Plan | None = None,
    ) -> Plan:
        """Make a plan for the model of a dry run. Every rank returns the same plan.

        Args:
            trace: the dry run.
            divided: dry runs with ever smaller stages, made only if no plan fits.
            precision: precision of the run.
            updaters: the optimizer of each parameter.
            fabric: the ranks that train together.
            before: the plan of the engine that is replaced. Its store exists until the new one is filled.
        """
        disk = disk_folder(self._backend.config)

        def make() -> Plan:
            request = request_of(
                self._backend.config,
                _always(trace),
                device=self.device,
                batch_size=trace.micro_batch_size,
                precision=precision,
                optimizer_state_bytes=updaters.state_bytes(self._backend.config.optimizer_state),
                micro_batch_size=trace.micro_batch_size,
                disk=disk,
            )
            rates = calibrate(request.device, disk)
            return make_plan(
                dataclasses.replace(
                    request,
                    resources=beside(request.resources, before),
                    calibration=rates,
                    ranks=fabric.local_size,
                    share=_share(fabric),
                    device_tier=fabric.size == 1,  # a loop may change weights in another way on each rank
                    divided=lambda: map(_always, divided),
                    update_kind=updaters.update_kind_on(self.device),
                )
            )

        # The plan is that of rank 0, but the path of the folder may differ between hosts.
        return dataclasses.replace(fabric.agree(make, Plan), disk=disk)


def beside(resources: Resources, before: Plan | None) -> Resources:
    """Return the limits of an engine that is made while stages of another one are in device memory.

    A limit that is not set is what the device has free, so it needs no change.
    """
    if before is None or before.prediction is None or resources.device_memory is None:
        return resources
    held = before.prediction.device_parts.get("weight store", 0)
    return dataclasses.replace(resources, device_memory=max(resources.device_memory - held, 0))


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
