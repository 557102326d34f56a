"""Plain data of planning: budgets of a run, decisions of a plan, and what the plan predicts."""

from __future__ import annotations

import dataclasses
import enum
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

from headwater.core.arithmetic import Kernels
from headwater.core.placement import ONE_RANK, Placement
from headwater.core.precision import Precision
from headwater.plan.step_trace import Trace


class Activations(enum.Enum):
    """Treatment of the tensors that a stage's backward needs from its forward."""

    KEEP = "keep"
    SELECTIVE = "selective"
    """Values of cheap operators are computed again, the others are kept. See [Note: recipes]."""
    RECOMPUTE = "recompute"
    RECOMPUTE_FROM_HOST = "recompute from host"
    """The inputs of the forward that runs again are offloaded."""
    OFFLOAD = "offload"

    # Policies of all stages are keys of caches. The hash of `enum` calls Python code for each stage.
    __hash__ = object.__hash__

    @property
    def is_recomputed(self) -> bool:
        """True if the forward runs again in backward."""
        return self is Activations.RECOMPUTE or self is Activations.RECOMPUTE_FROM_HOST

    @property
    def is_offloaded(self) -> bool:
        """True if tensors that wait for backward leave the compute device."""
        return self in (Activations.RECOMPUTE_FROM_HOST, Activations.OFFLOAD)


class Phase(enum.Enum):
    """The computation for which a stage is used."""

    FORWARD = "forward"
    AGAIN = "again"
    BACKWARD = "backward"


class Visit(NamedTuple):
    """A position in the schedule of a micro-batch.

    Attributes:
        use: index in `Trace.uses`.
        phase: `AGAIN` if the forward of a divided block is recomputed before the backward of its parts.
    """

    use: int
    phase: Phase


@dataclasses.dataclass(frozen=True)
class Resources:
    """Budgets of a run. `None` means what the machine has free.

    Attributes:
        device_memory: bytes on the compute device. On CPU the device's memory is host memory.
        host_memory: bytes of resident host memory, including the interpreter and libraries.
        disk: folder of the disk tier.
        disk_bytes: bytes that the run may take there.
    """

    device_memory: int | None = None
    host_memory: int | None = None
    disk: Path | None = None
    disk_bytes: int | None = None


class Budgets(NamedTuple):
    """Limits in bytes: of device memory, host memory and disk."""

    device_memory: int
    host_memory: int
    disk_bytes: int


@dataclasses.dataclass(frozen=True)
class StoreShare:
    """The fractions of the weight store's bytes that count against one rank's budgets.

    Attributes:
        wire: share of the weights in wire precision.
        state: share of everything else in the store.
        gradients: share of the sums that wait for the update, if these are not on the compute device.
        disk_ranks: ranks of this host that read or change data on its disk, each through separate buffers.
        images: number of stages that are updated at the same time with their weights in memory, beside the
            slabs.
        store_ranks: ranks of this host that do not compute.
        sums_stay: True if there are ranks on other hosts, with which sums of gradients are exchanged.
    """

    wire: float = 1.0
    state: float = 1.0
    gradients: float = 1.0
    disk_ranks: int = 1
    images: int = 0
    store_ranks: int = 0
    sums_stay: bool = False


WHOLE_STORE = StoreShare()


@dataclasses.dataclass(frozen=True)
class OthersBytes:
    """Bytes that other models of the process may occupy in one kind of memory.

    Attributes:
        held: bytes that all of them occupy at once, between their steps and in steps that have begun.
        in_step: further bytes that one of them occupies during a step, at most.
    """

    held: int = 0
    in_step: int = 0

    def beyond(self, used: int) -> OthersBytes:
        """Return the bytes that are not among the `used` bytes, which the process occupies already."""
        held = max(0, self.held - used)
        return OthersBytes(held, max(0, self.held + self.in_step - used) - held)

    def beside(self, step: int) -> int:
        """Return the bytes that must stay free beside a model whose step occupies `step` bytes.

        Models that wait for their next step compute one after another, so their steps use the same bytes.
        """
        return self.held + max(0, self.in_step - step)


@dataclasses.dataclass(frozen=True)
class ProcessMemory:
    """Memory of the process that belongs to its models and data workers, when a model gets a plan.

    Attributes:
        initial: bytes that the weights of this model occupy now, in host memory. They become free while the
            store is filled.
        waiting: bytes that the weights of models without a plan occupy now, in host memory.
        host: host memory of the models with a plan. What the process occupied before the first of them counts
            as held.
        device: their memory of the compute device; on CPU, where `host` includes it, nothing.
        workers: bytes of host memory of the data workers.
    """

    initial: int = 0
    waiting: int = 0
    host: OthersBytes = OthersBytes()
    device: OthersBytes = OthersBytes()
    workers: int = 0


ONE_MODEL = ProcessMemory()
"""A process with one model, which has no values yet."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted cost of a plan.

    Attributes:
        device_bytes: peak on the compute device (0 on CPU, where `host_bytes` includes it).
        host_bytes: peak resident host memory of the process.
        disk_bytes: bytes of the disk tier.
        step_s: seconds of one optimizer step; `None` without a calibration.
        host_parts: the parts of `host_bytes`, by name.
        step_parts: the parts of `step_s`, by name.
        device_parts: the parts of `device_bytes`, by name.
        disk_parts: the parts of `disk_bytes`, by name.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    step_s: float | None
    host_parts: dict[str, int]
    step_parts: dict[str, float]
    device_parts: dict[str, int] = dataclasses.field(default_factory=dict)
    disk_parts: dict[str, int] = dataclasses.field(default_factory=dict)


_AMPLE_SHARE = 0.8
"""Share of the budget up to which memory is ample."""

Tier = Literal["memory", "disk"]

Updates = Literal["on_fetch", "in_backward"]
"""When a stage is updated: when it is fetched next, or as soon as a backward is done with it."""


def shares_slabs(tier: Tier | None, device: str) -> bool:
    """True if the ranks of a host share slabs: on CPU, with weights on disk.

    Otherwise each rank copies the weights to its own slabs.
    """
    return tier == "disk" and device == "cpu"


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The choice between compiled and eager blocks.

    Attributes:
        compiled: True if blocks are compiled.
        reason: the reason, if a measurement or the lack of one has decided; empty if the user has decided.
    """

    compiled: bool = False
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Schedule, slabs, tiers, activations and micro-batches, decided before anything is allocated.

    Attributes:
        trace: the dry run that it was made from.
        precision: precision of the run.
        device: `cpu` or `cuda`.
        tier: where weights, masters and optimizer state are stored; see `in_memory` and `on_device`.
        in_place: True if weights are read in the memory tier, without slabs (CPU only).
        slabs: maximum number of slabs for each size class; with `len(stages)` or more, no stage is fetched
            twice in a step.
        activations: policy of each stage.
        micro_batch_size: samples computed at once.
        num_micro_batches: number of micro-batches in an optimizer step.
        gradient_tier: where gradients wait for the update.
        prediction: its predicted cost.
        disk: folder of the disk tier.
        budget: limits of the run, with a value for every limit that applies.
        placement: the ranks of the run; each computes its part of the batch.
        in_memory: stages that are stored in host memory although `tier` is `disk`.
        on_device: stages whose weights, masters, optimizer state and gradients are in device memory, whatever
            `tier` is. The device updates them.
        blocks: whether blocks are compiled.
        updates: when stages in host memory and on disk are updated. Those in device memory are always updated
            when they are used next.
        ranges: True if tensors have their memory in ranges that grow: see `core/tensor_memory.py` for a CPU,
            and `core/device_memory.py` for a GPU.
        user_loop: True if the user's own loop calls the model, and may read gradients. With several ranks,
            each rank then computes the gradient of the loss of its part, and these gradients are averaged.
        kernels: the kernels of matrix products.
    """

    trace: Trace
    precision: Precision
    device: str
    tier: Tier
    in_place: bool
    slabs: int
    activations: tuple[Activations, ...]
    micro_batch_size: int
    num_micro_batches: int
    gradient_tier: Tier
    prediction: Prediction | None = None
    disk: Path | None = None
    budget: Resources | None = None
    placement: Placement = ONE_RANK
    in_memory: tuple[int, ...] = ()
    on_device: tuple[int, ...] = ()
    blocks: Blocks = Blocks()
    updates: Updates = "on_fetch"
    ranges: bool = False
    user_loop: bool = False
    kernels: Kernels = "exact"

    @property
    def predicted(self) -> Prediction:
        """The predicted cost of a plan that has one, as every plan of the planner has."""
        assert self.prediction is not None, "the planner predicts each of its plans"
        return self.prediction

    @property
    def host_limit(self) -> int | None:
        """Bytes of host memory that the run may hold; `None`: no limit."""
        return None if self.budget is None else self.budget.host_memory

    @property
    def on_disk(self) -> tuple[int, ...]:
        """The stages whose weights, masters and optimizer state are stored on disk."""
        stages = range(len(self.trace.stages)) if self.tier == "disk" else ()
        return tuple(stage for stage in stages if stage not in (*self.in_memory, *self.on_device))

    @property
    def holds_exact_gradients(self) -> bool:
        """True if the store holds the tensors that autograd made, instead of sums in fp32.

        A sum of one gradient is exact in its own dtype, but unscaling of fp16 needs the range of fp32. A
        user's loop sees gradients in fp32, as in plain PyTorch: to clip them in 16 bits would round them.
        """
        is_read = self.user_loop and self.precision.mixed
        return self.num_micro_batches == 1 and self.precision.name != "fp16" and not is_read

    @property
    def updates_free_gradients(self) -> bool:
        """True if the gradients of a stage are freed during the backward that completes them.

        With several micro-batches the sums of all stages wait for the last backward.
        """
        return self.updates == "in_backward" and self.num_micro_batches == 1

    @property
    def in_host_memory(self) -> tuple[int, ...]:
        """The stages whose weights, masters and optimizer state are stored in host memory."""
        elsewhere = frozenset((*self.on_disk, *self.on_device))
        return tuple(stage for stage in range(len(self.trace.stages)) if stage not in elsewhere)

    @property
    def read_in_place(self) -> frozenset[int]:
        """The stages whose weights the device reads in the memory of the store, without a slab."""
        if self.in_place:
            return frozenset(range(len(self.trace.stages)))
        return frozenset((*self.on_device, *(self.in_memory if self.device == "cpu" else ())))

    def is_recomputed_inside(self, stage: int) -> bool:
        """True if a stage is a part of a divided block that is recomputed as a whole."""
        block = self.trace.stages[stage].part_of
        return block is not None and self.activations[block].is_recomputed

    @cached_property
    def visits(self) -> tuple[Visit, ...]:
        """The uses of one micro-batch in order: forward, and backward in reverse.

        Where a divided block is recomputed, its stages are used once more before its backward.
        """
        places = range(len(self.trace.uses))
        forward = [Visit(place, Phase.FORWARD) for place in places]
        if self.trace.inference:
            return tuple(forward)
        blocks = [self.trace.blocks[stage] for stage in self.trace.uses]
        backward: list[Visit] = []
        for block, run in groupby(reversed(places), key=blocks.__getitem__):
            turned = list(run)
            if block in self.trace.members and self.activations[block].is_recomputed:
                backward += [Visit(place, Phase.AGAIN) for place in reversed(turned)]
            backward += [Visit(place, Phase.BACKWARD) for place in turned]
        return (*forward, *backward)

    @cached_property
    def schedule(self) -> tuple[int, ...]:
        """Stages in the order in which one micro-batch uses them."""
        if not self.trace.members:
            return self.trace.schedule  # one tuple for the many plans of a search
        return tuple(self.trace.uses[visit.use] for visit in self.visits)

    @property
    def has_bf16_state(self) -> bool:
        """True if optimizer state is stored in bf16, which is not exact; see `ParamSpec.bf16_state`."""
        return any(param.bf16_state for param in self.trace.params)

    @property
    def converts_half_products(self) -> bool:
        """True if fp32 kernels compute products in bf16 and fp16 on CPUs where torch's kernels are slow."""
        return self.device == "cpu" and self.kernels != "exact"

    @property
    def uses_attention_kernel(self) -> bool:
        """True if the package's kernel computes attention; see `core.attention`."""
        # Dry runs are on fake tensors of the CPU, whatever the device of the plan is.
        return self.device == "cpu" and any(cost.forward.kernel_attention_flops for cost in self.trace.costs)

    @property
    def folder(self) -> Path:
        """The folder of the plan's files on disk; call this only if the plan puts something there."""
        assert self.disk is not None, "a plan that puts something on disk names a folder"
        return self.disk

    @property
    def shares_slabs(self) -> bool:
        """True if the ranks of a host share slabs; see `shares_slabs`."""
        return shares_slabs(self.tier, self.device)

    @property
    def returns_pages(self) -> bool:
        """True if the allocator returns pages of freed tensors, so that a large tensor gets new ones."""
        return self.device == "cpu" and not self.ranges and not self.memory_is_ample

    @property
    def memory_is_ample(self) -> bool:
        """True if every activation is kept and the predicted host memory is well below the budget.

        An allocator that keeps its pages is then faster. Near the budget it must not keep them, since their
        number cannot be predicted to a few percent.
        """
        if set(self.activations) != {Activations.KEEP}:
            return False
        if self.host_limit is None or self.prediction is None:
            return True
        return self.prediction.host_bytes <= _AMPLE_SHARE * self.host_limit
