"""Makes the plan and the engine of a run, from its model, its params and the resources of the machine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headwater.api.engines import EngineSteps, build_engine, warn_of_half_products
from headwater.config.sections import LoopConfig
from headwater.core.batches import equal_share
from headwater.core.errors import ConfigError
from headwater.core.patience import notice_if_long
from headwater.core.placement import ONE_RANK, Placement
from headwater.core.precision import usable_precision
from headwater.core.stage import MAY_BE_MISSING, ParamSpec
from headwater.core.units import counted
from headwater.fabric.fabric import ALONE, Fabric
from headwater.optim.spec import NO_UPDATES, OptimizerSpec
from headwater.plan.budget import check_without_model, make_plan
from headwater.plan.division import divisions
from headwater.plan.machine import warn_of_budgets, weight_bytes
from headwater.plan.options import (
    DividedTraces,
    PlanRequest,
    TraceFor,
    device_of,
    fixed_by,
    optimizer_state_bytes,
    resources_of,
)
from headwater.plan.outlook import RunLength
from headwater.plan.partition import Partition, find_stages
from headwater.plan.rates import Calibration
from headwater.plan.step_trace import NO_MASKS, MaskedWeights, Trace
from headwater.plan.trace import trace_step
from headwater.plan.types import WHOLE_STORE, Plan, ProcessMemory, StoreShare
from headwater.sparsity.sparsifier import Sparsifier
from headwater.store.rule import UpdateRule
from headwater.stream.engine import Engine
from headwater.trainer.batches import num_tokens
from headwater.trainer.job import Trainable
from headwater.trainer.sparse import make_sparsifier
from headwater.trainer.start import INITIAL_VALUES, Start

if TYPE_CHECKING:
    from headwater.config.run import CommonInitConfig


@dataclasses.dataclass(frozen=True)
class Workload:
    """The kind of step for which a plan is made: training or inference, and its batch size.

    Attributes:
        batch_size: samples of one step.
        optimizer: `NO_UPDATES` for an evaluation.
        micro_batch_size: samples computed at once; the plan chooses it if not given.
        data_workers: processes of a rank that read data.
        steps: steps of the run; `None` if unknown.
        compiled: True if the continued run has compiled blocks; `None` if its checkpoint does not say.
        sparsifier: the masks of sparse training; `None` if no weight is masked.
    """

    batch_size: int
    optimizer: OptimizerSpec = NO_UPDATES
    micro_batch_size: int | None = None
    data_workers: int = 0
    steps: int | None = None
    compiled: bool | None = None
    sparsifier: Sparsifier | None = None


def training_workload(
    init: CommonInitConfig,
    trainable: Trainable,
    batch_size: int,
    start: Start = INITIAL_VALUES,
    *,
    data_workers: int = 0,
) -> Workload:
    """Return the workload of a training step. Raises the errors of `make_sparsifier`.

    Args:
        init: the params.
        trainable: the model with its loss.
        batch_size: samples of one step.
        start: the start of the run. The micro-batch size of a continued run is used if the params do not set
            one. Its masks are taken from `start`.
        data_workers: processes of a rank that read data.
    """
    size = fixed_micro_batch_size(init, batch_size)
    # A loss that is not `divisible` cannot be computed from the losses of micro-batches.
    if size is None and not trainable.divisible:
        size = batch_size
    # With another size than before, gradients would be summed in another order and round differently.
    resumed = start.state.micro_batch_size if start.state else None
    if size is None and resumed and batch_size % resumed == 0:
        size = resumed
    return Workload(
        batch_size,
        optimizer_of(init, trainable),
        size,
        data_workers,
        compiled=start.state.compiled if start.state else None,
        sparsifier=make_sparsifier(init, trainable, start.take_masks() if init.sparsity else None),
    )


def run_length(trainable: Trainable, loop: LoopConfig, start: int = 0) -> RunLength:
    """Return what a run computes from `start` on. The number of steps is unknown if it is set in epochs."""
    epochs_only = loop.num_epochs is not None and loop.steps_per_epoch is None
    steps = None if epochs_only else max(0, loop.end_step(start) - start)
    return RunLength(num_tokens(trainable.example(1)), steps)


def optimizer_of(init: CommonInitConfig, trainable: Trainable) -> OptimizerSpec:
    """Return the optimizer of the params, with the model's factors on learning rates."""
    return dataclasses.replace(init.optimizer_spec, lr_scale=trainable.learning_rate_scale)


def fixed_micro_batch_size(init: CommonInitConfig, batch_size: int) -> int | None:
    """Return the micro-batch size that the params set, directly or as a number of micro-batches.

    Raises:
        ConfigError: if the two contradict each other, or do not divide the batch.
    """
    size, count = init.backend.micro_batch_size, init.loop.grad_accum_steps
    if count is None:
        return size
    if batch_size % count or (size is not None and size * count != batch_size):
        what = f"batch_size {batch_size} cannot be divided into {count} equal micro-batches"
        if size is not None:
            what = f"micro_batch_size {size} × grad_accum_steps {count} is not batch_size {batch_size}"
        raise ConfigError(
            what,
            where="trainer.init.loop.grad_accum_steps",
            remedy="set only one of grad_accum_steps and micro_batch_size, to a divisor of batch_size",
        )
    return batch_size // count


def check_settings(init: CommonInitConfig, batch_size: int, fabric: Fabric = ALONE) -> None:
    """Raise if settings that a plan must keep contradict each other. Called before data are read.

    Args:
        init: the params.
        batch_size: samples of one step over all ranks.
        fabric: the ranks that train together.

    Raises:
        ConfigError: names the setting.
    """

    def dry_run(size: int) -> Trace:
        raise AssertionError("these checks need no dry run")

    device, share = device_of(init.backend), equal_share(batch_size, fabric.num_csx)
    check_without_model(
        PlanRequest(
            dry_run,
            batch_size=share,
            precision=usable_precision(init.precision.precision, device),
            optimizer_state_bytes=0,
            resources=resources_of(init.backend),
            device=device,
            fixed=fixed_by(init.backend, fixed_micro_batch_size(init, share)),
            share=host_share(fabric.placement, fabric.hosts, fabric.host),
        )
    )


def plan_run(
    init: CommonInitConfig,
    trainable: Trainable,
    work: Workload,
    *,
    calibration: Calibration | None = None,
    placement: Placement = ONE_RANK,
    ranks: int | None = None,
    share: StoreShare = WHOLE_STORE,
) -> Plan:
    """Return a plan for `work` on this machine within the budgets of the params.

    Args:
        init: the params.
        trainable: the model with its loss.
        work: the step to plan.
        calibration: rates of the machine.
        placement: the ranks that train together.
        ranks: number of ranks that share this machine's budgets; all if not given.
        share: the part of the weight store on this machine.

    Raises:
        ConfigError: if the params request resources that do not exist.
        DoesNotFitError: if a budget is too small.
    """
    request = plan_request(init, trainable, work, device_of(init.backend))
    with notice_if_long("planning") as activity:

        def with_notice(trace_for: TraceFor) -> TraceFor:
            def run(size: int) -> Trace:
                activity.name = f"planning: dry run of {counted(size, 'sample', 'samples')}"
                try:
                    return trace_for(size)
                finally:
                    activity.name = "planning: comparing plans"

            return run

        plan = make_plan(
            dataclasses.replace(
                request.with_traces(with_notice),
                calibration=calibration,
                ranks=ranks or placement.size,
                share=share,
                kept=kept_elements(work) if placement.size == 1 and request.device == "cpu" else {},
                masks=masked_weights(work),
                process=ProcessMemory(initial=weight_bytes(trainable.model)),
            )
        )
    warn_of_budgets(request.resources, plan.device)
    warn_of_half_products(plan.device, plan.precision, plan.kernels, own_loop=False)
    return dataclasses.replace(plan, placement=placement)


def plan_request(init: CommonInitConfig, trainable: Trainable, work: Workload, device: str) -> PlanRequest:
    """Return the request for a plan of `work`, for one rank.

    Args:
        init: the params.
        trainable: the model with its loss.
        work: the step to plan.
        device: `cpu` or `cuda`.

    Returns:
        The request.
    """
    inference = work.optimizer is NO_UPDATES
    fixed = fixed_by(init.backend, work.micro_batch_size)
    if init.backend.compile == "auto" and work.compiled:
        fixed = dataclasses.replace(fixed, compiled=True)
    precision = usable_precision(init.precision.precision, device)
    return PlanRequest(
        dry_runs(init, trainable, device=device, inference=inference),
        divided=divided_dry_runs(init, trainable, device=device, inference=inference),
        batch_size=work.batch_size,
        precision=precision,
        optimizer_state_bytes=optimizer_state_bytes(work.optimizer, stored=init.backend.optimizer_state),
        update_kind=work.optimizer.update_kind_on(device),
        resources=resources_of(init.backend),
        device=device,
        fixed=fixed,
        data_workers=work.data_workers,
        kernels=init.backend.kernels(precision, device),
    )


def kept_elements(work: Workload) -> dict[str, int]:
    """Return name -> maximum number of unmasked elements, for parameters that may be stored compressed.

    The result is empty if some optimizer state has another shape than its parameter.
    """
    probe = ParamSpec("weight", (8, 8), torch.float32, torch.float32)
    rule = UpdateRule(work.optimizer)
    if work.sparsifier is None or not rule.elementwise:
        return {}
    if any(state.shape is not None for state in rule.state_layout(probe).values()):
        return {}
    found = {name: work.sparsifier.capacity(name) for name in work.sparsifier.names}
    return {name: count for name, count in found.items() if count is not None}


def masked_weights(work: Workload) -> MaskedWeights:
    """Return the sizes of the masks of sparse training."""
    masks = work.sparsifier
    if masks is None:
        return NO_MASKS
    sizes = {name: masks.numel(name) for name in masks.names}
    changing = (size for name, size in sizes.items() if masks.changes(name))
    num_bytes = sum(-(-size // 8) for size in sizes.values())
    return MaskedWeights(num_bytes, max(sizes.values()), max(changing, default=0))


def host_share(placement: Placement, hosts: Sequence[int], host: int) -> StoreShare:
    """Return which part of the weight store is on a host: all weights, and optimizer state of its ranks.

    Args:
        placement: the ranks.
        hosts: host of each rank.
        host: index of the host.
    """
    owners = [rank for rank in placement.owners if hosts[rank] == host]
    first, is_alone = hosts.index(host), hosts[-1] == 0
    updating = set(owners if placement.num_memx else owners[:1])  # on a disk
    # Ranks that update while other ranks compute have the weights of a stage in memory beside the slabs.
    ahead = len(updating) if placement.num_memx or not is_alone else 0
    return StoreShare(
        state=len(owners) / len(placement.owners),
        disk_ranks=len({first} | updating),
        images=ahead + (not is_alone),  # one more, for weights that arrive from other hosts
        store_ranks=len(owners) if placement.num_memx else 0,
        sums_stay=not is_alone,
    )


def dry_runs(
    init: CommonInitConfig,
    trainable: Trainable,
    *,
    device: str = "cpu",
    inference: bool = False,
    partition: Partition | None = None,
) -> TraceFor:
    """Return a function that makes a dry run with a given number of samples, once for each number.

    Args:
        init: the params.
        trainable: the model with its loss.
        device: `cpu` or `cuda`, which decides the precision and the casts of autocast.
        inference: run only the forward.
        partition: the stages; found automatically if not given.
    """

    @functools.cache
    def trace_for(size: int) -> Trace:
        return trace_step(
            trainable.model,
            trainable.example(size),
            usable_precision(init.precision.precision, device),
            loss_function=trainable.loss,
            partition=partition,
            inference=inference,
            device=device,
        )

    return trace_for


def divided_dry_runs(
    init: CommonInitConfig, trainable: Trainable, *, device: str = "cpu", inference: bool = False
) -> DividedTraces:
    """Return a function that returns the dry runs with ever smaller stages. The dry runs are cached.

    Args:
        init: the params.
        trainable: the model with its loss.
        device: `cpu` or `cuda`, which decides the precision and the casts of autocast.
        inference: run only the forward.
    """

    @functools.cache
    def traces() -> tuple[TraceFor, ...]:
        precision = usable_precision(init.precision.precision, device)
        partition = find_stages(trainable.model, precision)
        finer = divisions(trainable.model, partition)
        return tuple(
            dry_runs(init, trainable, device=device, inference=inference, partition=each) for each in finer
        )

    return traces


def make_engine(
    init: CommonInitConfig,
    trainable: Trainable,
    plan: Plan,
    optimizer: OptimizerSpec,
    *,
    blank: bool = False,
    fabric: Fabric = ALONE,
    sparsifier: Sparsifier | None = None,
) -> Engine:
    """Build an engine for a plan.

    Args:
        init: the params.
        trainable: the model with its loss.
        plan: the plan.
        optimizer: how weights are updated.
        blank: use zeros as initial values of parameters that a checkpoint will replace.
        fabric: the ranks that train together.
        sparsifier: the masks of sparse training; `None` if no weight is masked.
    """
    initial = trainable.initial
    if blank:
        initial = functools.partial(_blank, trainable)
    return build_engine(
        trainable.model,
        plan,
        optimizer,
        init.backend,
        initial=initial,
        fabric=fabric,
        steps=EngineSteps(trainable.loss, init.seed, None if sparsifier is None else sparsifier.first),
    )


def _blank(trainable: Trainable, spec: ParamSpec) -> torch.Tensor:
    """Return zeros, or the initial value of a parameter that a checkpoint may lack."""
    if trainable.initial is not None and MAY_BE_MISSING in trainable.pretrained_names(spec.name):
        return trainable.initial(spec)
    # An expanded tensor takes the memory of one element only.
    return torch.zeros((), device="cpu").expand(spec.shape)
