"""The request for a plan, and the part of it that the options of a backend decide."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from headwater.core.arithmetic import Kernels
from headwater.core.errors import ConfigError
from headwater.core.gpu import why_missing, why_unused
from headwater.core.precision import Precision
from headwater.core.stage import OptimizerState, ParamSpec
from headwater.core.warn_once import warn_once
from headwater.optim.spec import OptimizerSpec, UpdateKind
from headwater.plan.memory.slabs import minimum_slabs
from headwater.plan.rates import Calibration
from headwater.plan.step_trace import NO_MASKS, MaskedWeights, Trace
from headwater.plan.types import (
    ONE_MODEL,
    WHOLE_STORE,
    Activations,
    ProcessMemory,
    Resources,
    StoreShare,
    Tier,
    Updates,
    shares_slabs,
)
from headwater.store.layout import stored_dtype
from headwater.store.rule import UpdateRule

logger = logging.getLogger(__name__)

TraceFor = Callable[[int], Trace]
"""Function that returns the dry run of a micro-batch size. Calls with the same size should be cached."""

DividedTraces = Callable[[], Iterable[TraceFor]]
"""Function that returns the same dry runs with ever smaller stages; see `division.divisions`."""


def not_divided() -> Iterable[TraceFor]:
    """Return no dry runs: the stages of the model cannot be made smaller."""
    return ()


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Decisions that the user has made; `None` leaves them to the planner.

    Attributes:
        tier: where masters and optimizer state are stored.
        num_slabs: slabs of each size class; on CPU this also turns off computing in place.
        activations: policy of every stage (a stage that cannot be recomputed keeps its activations instead).
        micro_batch_size: samples computed at once.
        gradient_tier: where gradients wait for the update.
        stages_in_memory: number of stages in host memory if `tier` is `disk`.
        stages_on_device: number of stages that are stored and updated in device memory; all if the model has
            fewer.
        optimizer_state: `bf16` to store it in bf16, which is not exact.
        updates: when stages are updated. The planner never decides this, because with updates in backward an
            error loses the step.
        ranges: True if CPU tensors have their memory in ranges, see `core/tensor_memory.py`; by default, if
            this machine can build them.
        compiled: True if blocks are compiled. A compiled block decides itself what it saves, so no stage
            computes the values of cheap operators again.
    """

    tier: Tier | None = None
    num_slabs: int | None = None
    activations: Activations | None = None
    micro_batch_size: int | None = None
    gradient_tier: Tier | None = None
    stages_in_memory: int | None = None
    stages_on_device: int | None = None
    optimizer_state: OptimizerState = "exact"
    updates: Updates = "on_fetch"
    ranges: bool | None = None
    compiled: bool = False


NOT_FIXED = Fixed()
"""No decisions: the planner makes all of them."""


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """The step to plan and the limits of the plan.

    Attributes:
        trace_for: micro-batch size -> its dry run.
        batch_size: samples of one optimizer step.
        precision: precision of the run.
        optimizer_state_bytes: bytes of optimizer state for each trained element, as it is stored (8 for Adam,
            4 if it or the model is in bf16); the mean, if elements differ.
        resources: budgets of the run; one that is not set is what the machine has free.
        device: `cpu` or `cuda`.
        calibration: rates of the machine. Without them plans are compared by nominal rates, and the plan
            predicts no time.
        fixed: decisions that the user has made.
        base_bytes: host memory of the interpreter and its libraries; by default it is measured after the
            first dry run.
        checkpoints: True if the store is saved during training.
        share: the part of the weight store that counts against the budgets.
        ranks: number of ranks on this host, each on batches of this size. They share the host's memory.
        data_workers: processes of each rank that read data.
        divided: dry runs with smaller stages, which are planned only if no plan fits otherwise.
        device_tier: False if no stage may be stored in device memory.
        update_kind: how the optimizer updates on the device.
        user_loop: True if the user's own loop calls the model.
        kernels: the kernels of matrix products.
        kept: name of a masked parameter -> the most elements that its masks keep, if the store may leave out
            the others; see `ParamSpec.kept`.
        masks: the masks of sparse training.
        process: memory of this process that belongs to models.
    """

    trace_for: TraceFor
    _: dataclasses.KW_ONLY
    batch_size: int
    precision: Precision
    optimizer_state_bytes: float
    resources: Resources
    device: str = "cpu"
    calibration: Calibration | None = None
    fixed: Fixed = NOT_FIXED
    base_bytes: int | None = None
    checkpoints: bool = True
    share: StoreShare = WHOLE_STORE
    ranks: int = 1
    data_workers: int = 0
    divided: DividedTraces = not_divided
    device_tier: bool = True
    update_kind: UpdateKind = "fused"
    user_loop: bool = False
    kernels: Kernels = "exact"
    kept: Mapping[str, int] = dataclasses.field(default_factory=dict)
    masks: MaskedWeights = NO_MASKS
    process: ProcessMemory = ONE_MODEL

    @property
    def may_use_device_tier(self) -> bool:
        """True if stages may be stored and updated in device memory.

        The ranks are on one host, and all of them compute on an accelerator; see [Note: replicas].
        """
        one_host = not self.share.sums_stay and not self.share.store_ranks
        return self.device_tier and one_host and self.device != "cpu"

    @property
    def chooses_device_tier(self) -> bool:
        """True if the plan decides how many stages are in device memory, since the user has not."""
        return self.may_use_device_tier and self.fixed.tier is None and self.fixed.stages_on_device is None

    def with_traces(self, changed: Callable[[TraceFor], TraceFor]) -> PlanRequest:
        """Return this request with all of its dry runs, also those with smaller stages, changed."""
        return dataclasses.replace(
            self, trace_for=changed(self.trace_for), divided=lambda: map(changed, self.divided())
        )

    def minimum_slabs(self, trace: Trace, tier: Tier | None) -> int:
        """Return the fewest slabs of a size class with which a step can run."""
        sharers = self.ranks - self.share.store_ranks if shares_slabs(tier, self.device) else 1
        return minimum_slabs(trace, sharers)

    def micro_batch_sizes(self) -> list[int]:
        """Return the sizes to try: divisors of the batch size, each at most half of the one before."""
        if self.fixed.micro_batch_size is not None:
            return [self.fixed.micro_batch_size]
        sizes = [self.batch_size]
        while sizes[-1] > 1:
            halved = range(sizes[-1] // 2, 0, -1)
            sizes.append(next(size for size in halved if self.batch_size % size == 0))
        return sizes


class DiskOptions(Protocol):
    """The disk tier that a backend allows: a folder, and the bytes that may be used in it."""

    @property
    def path(self) -> Path: ...
    @property
    def size(self) -> int | None: ...


class BackendOptions(Protocol):
    """The options of a backend that matter for a plan; they have the names of the keys of a params file."""

    @property
    def backend_type(self) -> Literal["CSX", "CPU", "GPU"]: ...
    @property
    def device_memory(self) -> int | None: ...
    @property
    def host_memory(self) -> int | None: ...
    @property
    def disk(self) -> DiskOptions | None: ...
    @property
    def num_slabs(self) -> int | None: ...
    @property
    def stages_in_memory(self) -> int | None: ...
    @property
    def stages_on_device(self) -> int | None: ...
    @property
    def compile(self) -> Literal["auto"] | bool: ...
    @property
    def activations(self) -> Literal["auto", "keep", "selective", "recompute", "offload"]: ...
    @property
    def tier(self) -> Literal["auto", "memory", "disk"]: ...
    @property
    def gradient_tier(self) -> Literal["auto", "memory", "disk"]: ...
    @property
    def optimizer_state(self) -> OptimizerState: ...
    @property
    def updates(self) -> Updates: ...
    @property
    def allocator(self) -> Literal["tuned", "system"]: ...


def device_of(backend: BackendOptions) -> str:
    """Return `cpu` or `cuda`. For `CSX` it is `cuda` if torch finds a GPU.

    A warning is logged, once, if the machine has a GPU that torch cannot use.

    Raises:
        ConfigError: if the backend is `GPU` and torch finds no GPU.
    """
    check_gpu(backend, where="trainer.init.backend.backend_type")
    if backend.backend_type == "CPU":
        return "cpu"
    reason = why_unused()
    if reason is not None:
        warn_once(logger, "the CPU computes, because torch cannot use the GPU of this machine: %s", reason)
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_gpu(backend: BackendOptions, *, where: str) -> None:
    """Raise if a backend needs a GPU and torch does not find one.

    Raises:
        ConfigError: if the backend is `GPU` and torch finds no GPU.
    """
    if backend.backend_type == "GPU" and not torch.cuda.is_available():
        raise ConfigError(
            f"expected a GPU on this machine, but torch finds no GPU: {why_missing()}",
            where=where,
            remedy="write CPU, or CSX for the best device of this machine",
        )


def resources_of(backend: BackendOptions) -> Resources:
    """Return the resource limits of a backend."""
    given = backend.disk
    return Resources(
        device_memory=backend.device_memory,
        host_memory=backend.host_memory,
        disk=given.path if given else None,
        disk_bytes=given.size if given else None,
    )


def fixed_by(backend: BackendOptions, micro_batch_size: int | None = None) -> Fixed:
    """Return the decisions that the options of a backend make, which the planner must keep.

    Args:
        backend: the options.
        micro_batch_size: samples computed at once; the plan chooses it if not given.
    """
    return Fixed(
        tier=None if backend.tier == "auto" else backend.tier,
        num_slabs=backend.num_slabs,
        stages_in_memory=backend.stages_in_memory,
        stages_on_device=backend.stages_on_device,
        activations=None if backend.activations == "auto" else Activations(backend.activations),
        micro_batch_size=micro_batch_size,
        gradient_tier=None if backend.gradient_tier == "auto" else backend.gradient_tier,
        optimizer_state=backend.optimizer_state,
        updates=backend.updates,
        ranges=False if backend.allocator == "system" else None,
        compiled=backend.compile is True,
    )


def optimizer_state_bytes(
    optimizer: OptimizerSpec,
    options: Mapping[str, Any] | None = None,
    *,
    stored: OptimizerState = "exact",
    dtype: torch.dtype = torch.float32,
) -> int:
    """Return the bytes of state that the store keeps for each element of a parameter (8 for Adam in fp32).

    Args:
        optimizer: the kind of optimizer.
        options: the options of the parameter's group.
        stored: the option `optimizer_state` of the backend.
        dtype: dtype of the parameter.
    """
    probe = ParamSpec("weight", (8, 8), dtype, dtype, bf16_state=stored == "bf16")
    layout = UpdateRule(optimizer, options).state_layout(probe)
    # A state with another shape than the parameter does not grow with its elements.
    return sum(stored_dtype(probe, tensor).itemsize for tensor in layout.values() if tensor.shape is None)
