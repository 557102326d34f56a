"""Plain data of planning: results of the dry run, resources of the machine, and decisions of the plan."""

from __future__ import annotations

import dataclasses
import enum
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

from headwater.core.placement import ONE_RANK, Placement
from headwater.core.precision import Precision, PrecisionName
from headwater.core.stage import StageSpec


class Activations(enum.Enum):
    """Treatment of the tensors that a stage's backward needs from its forward."""

    KEEP = "keep"
    SELECTIVE = "selective"
    """Values of cheap operators are computed again, the others are kept. See [Note: recipes]."""
    RECOMPUTE = "recompute"
    RECOMPUTE_FROM_HOST = "recompute from host"
    """The inputs of the forward that runs again are offloaded."""
    OFFLOAD = "offload"

    @property
    def is_recomputed(self) -> bool:
        """True if the forward runs again in backward."""
        return self in (Activations.RECOMPUTE, Activations.RECOMPUTE_FROM_HOST)

    @property
    def is_offloaded(self) -> bool:
        """True if tensors that wait for backward leave the compute device."""
        return self in (Activations.RECOMPUTE_FROM_HOST, Activations.OFFLOAD)


ADAMW_BYTES = 28
"""Bytes that the update of an fp32 parameter reads (weight, gradient, two moments) and writes."""


@dataclasses.dataclass(frozen=True)
class StageCost:
    """Cost of one forward of one micro-batch through a stage, summed over the stage's uses.

    Attributes:
        flops: floating-point operations of the forward (matrix products, attention, convolutions).
        saved_bytes: bytes that autograd keeps for the backward, without weights and stage inputs.
        input_bytes: bytes of the tensors that enter the stage, and are kept if it is recomputed.
        output_bytes: bytes of the tensors that leave it.
        transient_bytes: largest bytes of short-lived tensors alive at once within one operator call; in
            inference, largest bytes of all activations alive at once.
        recomputable: True if the stage has a separate module whose forward can run again.
        backward_flops: floating-point operations of the backward, recomputation not counted.
        attention_flops: the part of `flops` in torch's fused attention, which has a separate rate.
        backward_attention_flops: the part of `backward_flops` in torch's fused attention.
        kernel_attention_flops: the part of `flops` in the package's kernel of attention.
        backward_kernel_attention_flops: the part of `backward_flops` in that kernel.
        cheap_bytes: the part of `saved_bytes` that cheap operators can compute again from the rest.
        again_bytes: bytes of all values that these operators compute.
        new_bytes: bytes of the large tensors that the operators of the forward allocate. An allocator that
            returns pages gets new ones for each of them.
        backward_new_bytes: those of the backward, recomputation not counted.
        operators: number of operators of the forward, views included.
        backward_operators: those of the backward, recomputation not counted.
    """

    flops: int
    saved_bytes: int
    input_bytes: int
    output_bytes: int
    transient_bytes: int
    recomputable: bool = True
    backward_flops: int = 0
    attention_flops: int = 0
    backward_attention_flops: int = 0
    kernel_attention_flops: int = 0
    backward_kernel_attention_flops: int = 0
    cheap_bytes: int = 0
    again_bytes: int = 0
    new_bytes: int = 0
    backward_new_bytes: int = 0
    # Not compared: calls between stages count for either of them, and a dry run may skip equal parts.
    operators: int = dataclasses.field(default=0, compare=False)
    backward_operators: int = dataclasses.field(default=0, compare=False)


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
class Trace:
    """The dry run of one micro-batch on fake tensors.

    Attributes:
        stages: the stages of the model.
        uses: index of the stage at each use in forward order; backward runs them in reverse.
        costs: one per stage.
        sites: qualified module name -> stages bound while that module's forward runs.
        micro_batch_size: samples in the traced batch.
        inference: True if only the forward was run, without gradients.
        written: names of the parameters that the forward itself changes.
        assigned_after_use: those of them that get other memory after autograd has saved the old one.
    """

    stages: tuple[StageSpec, ...]
    uses: tuple[int, ...]
    costs: tuple[StageCost, ...]
    sites: dict[str, tuple[int, ...]]
    micro_batch_size: int
    inference: bool = False
    written: tuple[str, ...] = ()
    assigned_after_use: tuple[str, ...] = ()

    @cached_property
    def schedule(self) -> tuple[int, ...]:
        """Stages in the order in which one micro-batch uses them, if no divided block is recomputed."""
        return self.uses if self.inference else self.uses + self.uses[::-1]

    @cached_property
    def first_use(self) -> dict[int, int]:
        """Stage -> the index of its first use in `uses`, at which its gradients are complete in backward."""
        return {stage: use for use, stage in reversed(list(enumerate(self.uses)))}

    @cached_property
    def last_use(self) -> dict[int, int]:
        """Stage -> the index of its last use in `uses`, which begins its backward."""
        return {stage: use for use, stage in enumerate(self.uses)}

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """For each stage the divided block that it belongs to: the stage around it, or the stage itself."""
        return tuple(stage.index if stage.part_of is None else stage.part_of for stage in self.stages)

    @cached_property
    def members(self) -> dict[int, tuple[int, ...]]:
        """Divided block (the stage around its parts) -> its stages: the parts, and itself."""
        parts = {stage.part_of for stage in self.stages if stage.part_of is not None}
        return {
            block: tuple(stage for stage, around in enumerate(self.blocks) if around == block)
            for block in sorted(parts)
        }

    def storing(self, optimizer_state: OptimizerState) -> Trace:
        """Return this dry run for a store that keeps optimizer state so; see `ParamSpec.bf16_state`."""
        if optimizer_state == "exact":
            return self

        def changed(stage: StageSpec) -> StageSpec:
            params = (dataclasses.replace(param, bf16_state=True) for param in stage.params)
            return dataclasses.replace(stage, params=tuple(params))

        stages = map(changed, self.stages)
        return dataclasses.replace(self, stages=tuple(stages))


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
    """Limits in bytes: of device memory, host memory and disk. Fields have the names of the params."""

    device_memory: int
    host_memory: int
    disk_bytes: int


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Rates at which one machine computes and moves bytes; each is the best of a few short runs.

    Attributes:
        fp32_flops_per_s: matrix products in fp32 on the compute device; likewise `bf16_…` and `fp16_…`.
        fp32_saved_bytes_per_s: bytes that autograd saves in forward, divided by the time of forward and
            backward of a transformer block outside of its matrix products and attention (norms, activation
            functions, allocation).
        memory_bytes_per_s: bytes read plus bytes written by a copy within the compute device's memory.
        adamw_params_per_s: fp32 parameters that AdamW updates in host memory, or others with as many bytes
            (`ADAMW_BYTES` each).
        link_bytes_per_s: pinned host memory to the device; `None` on CPU.
        disk_read_bytes_per_s: from the folder of the disk tier; `None` if no folder was given.
        disk_write_bytes_per_s: to that folder.
        fp32_attention_flops_per_s: torch's fused attention, forward and backward; that of matrix products if
            `None`.
        kernel_attention_flops_per_s: the package's kernel of attention in bf16 (`core.attention`), forward
            and backward; `None` if this machine does not use it.
        new_bytes_per_s: bytes of new pages that the cores get from the system, clear and return; `None` if it
            was not measured. Pages then cost no time.
    """

    fp32_flops_per_s: float
    bf16_flops_per_s: float
    fp16_flops_per_s: float
    fp32_saved_bytes_per_s: float
    bf16_saved_bytes_per_s: float
    fp16_saved_bytes_per_s: float
    memory_bytes_per_s: float
    adamw_params_per_s: float
    link_bytes_per_s: float | None = None
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    fp32_attention_flops_per_s: float | None = None
    bf16_attention_flops_per_s: float | None = None
    fp16_attention_flops_per_s: float | None = None
    kernel_attention_flops_per_s: float | None = None
    new_bytes_per_s: float | None = None

    def flops_per_s(self, precision: PrecisionName) -> float:
        """Floating-point operations per second of matrix products in `precision`."""
        return {
            "fp32": self.fp32_flops_per_s,
            "bf16": self.bf16_flops_per_s,
            "fp16": self.fp16_flops_per_s,
        }[precision]

    def attention_flops_per_s(self, precision: PrecisionName) -> float:
        """Floating-point operations per second of fused attention in `precision`."""
        found = {
            "fp32": self.fp32_attention_flops_per_s,
            "bf16": self.bf16_attention_flops_per_s,
            "fp16": self.fp16_attention_flops_per_s,
        }[precision]
        return found or self.flops_per_s(precision)

    def saved_bytes_per_s(self, precision: PrecisionName) -> float:
        """Bytes saved per second of training time outside of matrix products, in `precision`."""
        return {
            "fp32": self.fp32_saved_bytes_per_s,
            "bf16": self.bf16_saved_bytes_per_s,
            "fp16": self.fp16_saved_bytes_per_s,
        }[precision]


@dataclasses.dataclass(frozen=True)
class StoreShare:
    """The fractions of the weight store's bytes that count against one rank's budgets.

    Attributes:
        wire: share of the weights in wire precision.
        state: share of everything else in the store.
        gradients: share of the sums that wait for the update, if these are not on the compute device.
        disk_ranks: ranks of this host that read or change data on its disk, each through separate buffers.
        images: number of stages whose weights are in memory beside the slabs at once, when they are updated.
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
OptimizerState = Literal["exact", "bf16"]
"""How optimizer state is stored: with the optimizer's bits, or rounded to bf16."""


Updates = Literal["on_fetch", "in_backward"]
"""When a stage is updated: when it is fetched next, or as soon as a backward is done with it."""


def shares_slabs(tier: Tier | None, device: str) -> bool:
    """True if the ranks of a host share slabs: on CPU, with weights on disk.

    Weights in memory are copied by each rank for itself, and so are weights to an accelerator.
    """
    return tier == "disk" and device == "cpu"


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The choice between compiled and eager blocks.

    Attributes:
        compiled: True if blocks are compiled.
        reason: why, if the choice was made by a measurement or for lack of one; empty if the user made it.
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
        ranges: True if CPU tensors have their memory in ranges, see `core/tensor_memory.py`.
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

    @property
    def on_disk(self) -> tuple[int, ...]:
        """The stages whose weights, masters and optimizer state are stored on disk."""
        stages = range(len(self.trace.stages)) if self.tier == "disk" else ()
        return tuple(stage for stage in stages if stage not in (*self.in_memory, *self.on_device))

    @property
    def holds_exact_gradients(self) -> bool:
        """True if the store holds the tensors that autograd made, instead of sums in fp32.

        A sum of one gradient is exact in its own dtype, but unscaling of fp16 needs the range of fp32.
        """
        return self.num_micro_batches == 1 and self.precision.name != "fp16"

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
        return any(param.bf16_state for stage in self.trace.stages for param in stage.params)

    @property
    def uses_attention_kernel(self) -> bool:
        """True if the package's kernel computes attention; see `core.attention`."""
        # Dry runs are on fake tensors of the CPU, whatever the device of the plan is.
        return self.device == "cpu" and any(cost.kernel_attention_flops for cost in self.trace.costs)

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
        limit = None if self.budget is None else self.budget.host_memory
        if limit is not None and self.prediction is not None:
            near = self.prediction.host_bytes > _AMPLE_SHARE * limit
        else:
            near = False
        return set(self.activations) == {Activations.KEEP} and not near
