"""Bytes of a plan on the device, in host memory and on disk, at the moment of a step with the most."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from headwater.core.checked_files import BEHIND_BYTES
from headwater.core.stage import StageSpec
from headwater.core.transfers import BUFFER_BYTES
from headwater.core.units import MIB
from headwater.plan.belady import slab_capacity
from headwater.plan.types import WHOLE_STORE, Activations, Plan, StageCost, StoreShare, Trace
from headwater.store.layout import (
    DEVICE_PIECE_ELEMENTS,
    GROUP_BYTES,
    MOST_UNFINISHED,
    PIECE_ELEMENTS,
    Encoding,
    encoding_of,
)

if TYPE_CHECKING:
    from headwater.optim.spec import UpdateKind

_STAGING_BUFFERS = 4
_SNAPSHOT_THREADS = 2
OFFLOAD_WINDOW_BYTES = 128 * MIB
"""Bytes of activations that may be on their way to the disk at once; as many may be on their way back."""
OFFLOAD_WRITERS, OFFLOAD_BLOCK_BYTES = 2, 16 * MIB
"""Number of threads that write activations, and the size of the buffer of each."""
_FP32_BYTES = 4
_KERNEL_TENSORS: Mapping[UpdateKind, int] = {"fused": 0, "pieces": 6, "whole": 6}
"""fp32 tensors that an update without a fused kernel adds on a device: 2 copies for an undo, 4 of its own."""
# Measured on CPU: memory of the allocator, as a share of the bytes of tensors.
_ALLOCATOR_SHARE, _SHARE_OF_KEPT_PAGES = 0.2, 0.5


@dataclasses.dataclass(frozen=True)
class StageBytes:
    """Bytes of one stage, by kind.

    Attributes:
        slab: the weights in wire precision, on the device and in the store.
        state: everything else in the store: the rest of the masters, and optimizer state.
        gradient: gradients as autograd makes them, in wire precision.
        gradient_sum: gradients that wait for the update, if they are summed in fp32.
        trained: number of trained parameters.
    """

    slab: int
    state: int
    gradient: int
    gradient_sum: int
    trained: int

    @property
    def stored(self) -> int:
        """Bytes in the weight store."""
        return self.slab + self.state


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes of activations and gradients on the compute device, when their sum is largest in a step."""

    activations: int
    gradients: int
    keeps_pages: bool = False

    @property
    def allocator(self) -> int:
        """Bytes that the allocator holds beside the tensors: gaps, and scratch memory of kernels."""
        share = _SHARE_OF_KEPT_PAGES if self.keeps_pages else _ALLOCATOR_SHARE
        return int((self.activations + self.gradients) * share)

    @property
    def total(self) -> int:
        return self.activations + self.gradients + self.allocator

    @property
    def parts(self) -> dict[str, int]:
        return {"activations": self.activations, "gradients": self.gradients, "allocator": self.allocator}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of device memory, host memory and disk, by purpose. On CPU, all memory is host memory."""

    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]


class Footprint:
    """Adds up the bytes of plans for one trace.

    Args:
        trace: the dry run.
        optimizer_state_bytes: bytes of optimizer state for each trained parameter.
        update_kind: how the optimizer updates on the device.
        base_bytes: resident host memory of the interpreter and its libraries.
        checkpoints: True if the store is saved during training.
        share: the part of the store that counts.
        ranks: number of ranks on this host. They share the host's memory.
        worker_bytes: host memory of the data workers of one rank.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        optimizer_state_bytes: int,
        base_bytes: int,
        update_kind: UpdateKind = "fused",
        checkpoints: bool = True,
        share: StoreShare = WHOLE_STORE,
        ranks: int = 1,
        worker_bytes: int = 0,
    ) -> None:
        self.trace = trace
        self._ranks = ranks - share.store_ranks  # compute ranks
        self.sums_stay = ranks > 1 or share.sums_stay
        self.stages = tuple(
            _stage_bytes(stage, optimizer_state_bytes, trained=not trace.inference) for stage in trace.stages
        )
        self.slab_sizes = tuple(stage.slab for stage in self.stages)
        self.last_use = {stage: position for position, stage in enumerate(trace.uses)}
        self.first_use = {stage: position for position, stage in reversed(list(enumerate(trace.uses)))}
        self._base_bytes = ranks * base_bytes
        self._worker_bytes = self._ranks * worker_bytes
        self.share = share
        self._checkpoints = checkpoints and not trace.inference
        narrow = any(param.bf16_state for stage in trace.stages for param in stage.params)
        # Each piece has a master, a gradient, and fp32 copies of the state tensors that are stored in bf16.
        states = optimizer_state_bytes // (2 if narrow else 4)
        self._workspaces = 2 + (states if narrow else 0)
        # More on the device: the integers with which masters are joined and split; the state that the first
        # update makes, or the copies of it from which a later one is undone.
        self._device_workspaces = self._workspaces + 1 + states + _KERNEL_TENSORS[update_kind]
        self._uncut = [_largest_uncut(stage, update_kind) for stage in trace.stages]
        self._peaks: dict[object, Peak] = {}

    def memory(self, plan: Plan) -> Memory:
        """Return the peak bytes of `plan` in each kind of memory."""
        peak = self.peak(plan)
        slabs = _pool_bytes(self.sizes_in_slabs(plan), plan.slabs)
        if not plan.shares_slabs:
            slabs *= self._ranks_beside(plan)
        on_device = _on_device_bytes(
            [self.stages[stage] for stage in plan.on_device],
            self._device_workspaces,
            uncut=max((self._uncut[stage] for stage in plan.on_device), default=0),
            arriving=max(arriving_sums(self, plan), default=0),
        )
        compute = {"slabs": slabs} | on_device | peak.parts
        host, disk = self._store_bytes(plan)
        held, moved = self.held_gradients(plan), self.offloaded_bytes(plan.activations)
        if plan.gradient_tier == "disk":
            disk["gradients"] = held
        if plan.device == "cpu":
            return Memory({}, host | compute, disk | {"activations": moved})
        staying = _staying(plan, self.sums_stay)
        elsewhere = [stage for index, stage in enumerate(self.stages) if index not in staying]
        largest = max((stage.gradient_sum for stage in elsewhere), default=0)
        on_disk = plan.gradient_tier == "disk"
        arriving = self._ranks * largest if on_disk or self.sums_stay else 0
        if plan.updates_free_gradients:
            # Beside those of the stages that wait, as many as may be on their way to their sums.
            held = max(_waiting_in_backward(self, plan)) + largest
        host["gradients"] = int(self.share.gradients * (0 if on_disk else held)) + arriving
        return Memory(compute, host | {"activations": self._ranks * moved}, disk)

    def disk_readers(self, plan: Plan) -> int:
        """Return how many ranks each read the same weights from the disk."""
        return 1 if plan.device == "cpu" else self._ranks

    def _ranks_beside(self, plan: Plan) -> int:
        """Return how many ranks compute in the same memory. An accelerator has one rank."""
        return self._ranks if plan.device == "cpu" else 1

    def _store_bytes(self, plan: Plan) -> tuple[dict[str, int], dict[str, int]]:
        """Return the bytes of the weight store in host memory and on disk."""
        host = {"interpreter": self._base_bytes, "data workers": self._worker_bytes}
        held_on_device = [self.stages[stage] for stage in plan.on_device]
        on_device = sum(stage.stored for stage in held_on_device)
        copies = _snapshot_copies(held_on_device) if self._checkpoints else 0
        if plan.tier == "memory":
            held = {"weight store": self.stored_bytes - on_device, "snapshot": copies + self._writing_bytes}
            return host | held, {}
        in_memory = _counted_bytes((self.stages[stage] for stage in plan.in_memory), self.share)
        readers, images = self.share.disk_ranks, self.share.images
        if plan.device != "cpu":  # each rank reads for itself, through page-locked memory
            readers = max(readers, self._ranks + self.share.store_ranks)
            images += self._ranks
        staging = readers * self.staging_bytes + images * max(self.slab_sizes)
        held = {"weight store": in_memory} if plan.in_memory else {}
        held |= {"staging": staging, "snapshot": max(self.snapshot_bytes, copies + self._writing_bytes)}
        return host | held, {"weight store": self.stored_bytes - in_memory - on_device}

    def sizes_in_slabs(self, plan: Plan) -> tuple[int, ...]:
        """Return the bytes of the weights of each stage that is copied to a slab, in the order of stages."""
        in_place = plan.read_in_place
        if not in_place:
            return self.slab_sizes
        return tuple(size for stage, size in enumerate(self.slab_sizes) if stage not in in_place)

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of the weight store, as far as these count against this rank's budgets (see `StoreShare`)."""
        return _counted_bytes(self.stages, self.share)

    @cached_property
    def staging_bytes(self) -> int:
        """Bytes of host memory for the disk tier's buffers, and for the updater's fp32 workspaces."""
        per_param = max((stage.state / stage.trained for stage in self.stages if stage.trained), default=0)
        piece = max(1, int(PIECE_ELEMENTS * per_param))
        group = -(-GROUP_BYTES // piece) * piece
        largest = max(stage.state for stage in self.stages)
        return _STAGING_BUFFERS * min(group, largest) + self._workspaces * PIECE_ELEMENTS * _FP32_BYTES

    @cached_property
    def snapshot_bytes(self) -> int:
        """Bytes of host memory of the wire images that a checkpoint of the disk tier saves at the same time.

        One stage is saved in the background, and another by a thread that is about to update it. Both write
        through the same buffers.
        """
        if not self._checkpoints:
            return 0
        pieces = _SNAPSHOT_THREADS * 2 * PIECE_ELEMENTS * _FP32_BYTES
        return sum(sorted(self.slab_sizes)[-_SNAPSHOT_THREADS:]) + pieces + self._writing_bytes

    @cached_property
    def _writing_bytes(self) -> int:
        """Bytes of the buffers through which checkpoints are written; small parameters need none."""
        params = (param for stage in self.trace.stages for param in stage.params)
        is_large = any(param.numel * _FP32_BYTES >= BEHIND_BYTES for param in params)
        return BUFFER_BYTES if self._checkpoints and is_large else 0

    def held_gradients(self, plan: Plan) -> int:
        """Return the bytes of the gradients that the store keeps from the end of backward to the update.

        Those that stay on the device are not counted: see `peak`.
        """
        staying = _staying(plan, self.sums_stay)
        stages = (stage for stage in range(len(self.stages)) if stage not in staying)
        return sum(self.held_gradient(plan, stage) for stage in stages)

    def held_gradient(self, plan: Plan, stage: int) -> int:
        """Return the bytes of one stage's gradients that the store keeps from backward to the update."""
        held = self.stages[stage]
        return held.gradient if _holds_exact_gradients(plan) else held.gradient_sum

    def offloaded_bytes(self, activations: Sequence[Activations]) -> int:
        """Return the bytes of all stages' activations that one micro-batch moves off the compute device."""
        pairs = zip(self.trace.costs, activations, strict=True)
        return sum(offloaded_bytes(cost, policy) for cost, policy in pairs)

    def peak(self, plan: Plan) -> Peak:
        """Return the bytes of activations and gradients on the compute device, when their sum is largest."""
        # The key holds all that a peak depends on; the search asks for the same peak many times.
        where = plan.device, plan.tier, plan.gradient_tier, plan.in_memory, plan.on_device
        key = plan.activations, where, plan.num_micro_batches, plan.updates
        if key not in self._peaks:
            ranks = self._ranks_beside(plan)
            gradients = self._gradients_alive(plan)
            moments = zip(self._live(plan.activations), gradients, strict=True)
            # In a search plans have no budget yet, so this depends on parts of the key alone.
            keeps_pages = plan.device == "cpu" and plan.memory_is_ample
            self._peaks[key] = max(
                (Peak(ranks * live, held, keeps_pages) for live, held in moments),
                key=lambda peak: peak.total,
            )
        return self._peaks[key]

    def _live(self, activations: Sequence[Activations]) -> list[int]:
        """Return the bytes of activations alive during each use, for forward and backward.

        The activations of a stage are counted from its last use on. A stage that is used twice is usually a
        tied embedding, whose first use keeps almost nothing.
        """
        if self.trace.inference:
            return [self.trace.costs[stage].transient_bytes for stage in self.trace.uses]
        held, away, busy = [], [], []
        for position, stage in enumerate(self.trace.uses):
            cost, policy, last = self.trace.costs[stage], activations[stage], self.last_use[stage]
            block = _recomputed_block(self.trace, stage, policy)
            held.append(_held(cost, policy) if last == position and block in (None, stage) else 0)
            away.append(offloaded_bytes(cost, policy) if last == position else 0)
            if block is None:
                busy.append(_busy(cost, policy, self._num_uses[stage]))
            else:  # the whole block has run again, and keeps its activations until its backward ends
                inside = (self.trace.costs[member] for member in self.trace.members[block])
                busy.append(_passing(cost) + sum(map(_kept, inside)))
        moments = zip(accumulate(held), accumulate(away), busy, strict=True)
        return [kept + _moving(moved) + working for kept, moved, working in moments]

    @cached_property
    def _num_uses(self) -> dict[int, int]:
        return {stage: self.trace.uses.count(stage) for stage in self.last_use}

    def _gradients_alive(self, plan: Plan) -> list[int]:
        """Return the bytes of gradients in the compute device's memory during the backward of each use.

        With one micro-batch the store holds the gradients that are complete. With several it holds all sums,
        and so it does if several ranks add to them. An update frees the gradients of a stage when the next
        forward reaches the stage, so that forward is the mirror image of backward.
        """
        arriving, exact = self._arriving_bytes, _holds_exact_gradients(plan)
        if plan.device != "cpu":
            # With copies of a complete gradient, on their way to the host.
            complete = [
                self.stages[stage].gradient if self.first_use[stage] == position else 0
                for position, stage in enumerate(self.trace.uses)
            ]
            largest = [*accumulate(reversed(complete), max)][::-1]
            staying = {stage: self.held_gradient(plan, stage) for stage in _staying(plan, self.sums_stay)}
            if plan.num_micro_batches > 1:  # all sums wait
                waiting = [sum(staying.values())] * len(self.trace.uses)
            else:
                waiting = _complete_after(staying, self.trace.uses, self.first_use)
            moments = zip(arriving, largest, waiting, strict=True)
            return [count + min(count, copied) + held for count, copied, held in moments]
        if plan.gradient_tier == "disk":
            summing = self._ranks + self.share.store_ranks
            return [summing * self._passing(position, exact) for position in range(len(self.trace.uses))]
        if plan.num_micro_batches > 1 or self.sums_stay:
            held = self.held_gradients(plan)
            return [held + self._ranks * count for count in arriving]
        if plan.updates_free_gradients:
            return _waiting_in_backward(self, plan)
        sizes = {stage: self.held_gradient(plan, stage) for stage in self.first_use}
        after = _complete_after(sizes, self.trace.uses, self.first_use)
        return [done + count for done, count in zip(after, arriving, strict=True)]

    @cached_property
    def _arriving_bytes(self) -> list[int]:
        return [self._arriving(position) for position in range(len(self.trace.uses))]

    def _arriving(self, position: int) -> int:
        """Return the bytes of gradients that autograd has begun but not handed over in one use's backward."""
        total = 0
        for stage, first in self.first_use.items():
            if first <= position <= self.last_use[stage]:
                second = position == first < self.last_use[stage]  # a new summand beside the first one
                total += self.stages[stage].gradient * (2 if second else 1)
        return total

    def _passing(self, position: int, exact: bool) -> int:
        """Return the bytes of a use's gradients that are incomplete, or are being summed and written."""
        total = 0
        for stage, first in self.first_use.items():
            if first <= position <= self.last_use[stage]:
                total += self.stages[stage].gradient
            if first == position:  # complete: with the copy that is written, or the old sum and the new one
                total += self.stages[stage].gradient if exact else 2 * self.stages[stage].gradient_sum
        return total


def _largest_uncut(stage: StageSpec, update_kind: UpdateKind) -> int:
    """Return the elements of the largest parameter of a stage that is not updated piece by piece."""
    trained = (param for param in stage.params if param.requires_grad)
    sizes = (param.numel for param in trained if update_kind == "whole" or param.strides is not None)
    return max(sizes, default=0)


def _staying(plan: Plan, sums_stay: bool) -> tuple[int, ...]:
    """Return the stages whose gradients stay on the device; none if several ranks sum them on the host."""
    return () if sums_stay else plan.on_device


def arriving_sums(footprint: Footprint, plan: Plan) -> list[int]:
    """Return for each stage in device memory the bytes of sums that a rank copies to its device."""
    stages = plan.on_device if footprint.sums_stay else ()
    return [footprint.held_gradient(plan, stage) for stage in stages]


def _waiting_in_backward(footprint: Footprint, plan: Plan) -> list[int]:
    """Return the bytes of gradients in host memory during the backward of each use.

    An update frees the gradients of a stage while the backward continues. Beside the gradients that
    arrive, those of the last complete stage wait for the backward to come to another stage. If a thread
    updates, those of the stages before it may wait too.
    """
    held = [
        0 if stage in plan.on_device else footprint.held_gradient(plan, stage)
        for stage in footprint.first_use
    ]
    sizes = dict(zip(footprint.first_use, held, strict=True))
    on_thread = plan.device != "cpu" or plan.on_disk
    most = 1 + (MOST_UNFINISHED if on_thread else 0)
    waiting, last = [0] * len(footprint.trace.uses), list[int]()
    for position in reversed(range(len(footprint.trace.uses))):
        stage = footprint.trace.uses[position]
        waiting[position] = sum(last[-most:]) + footprint._arriving_bytes[position]
        if footprint.first_use[stage] == position:
            last.append(sizes[stage])
    return waiting


def _complete_after(sizes: Mapping[int, int], uses: Sequence[int], first_use: Mapping[int, int]) -> list[int]:
    """Return for each use the bytes of the gradients that are complete when its backward begins.

    Args:
        sizes: stage -> bytes of its gradients, for the stages that count.
        uses: the stage of each use.
        first_use: stage -> its first use.
    """
    complete = [
        sizes.get(stage, 0) if first_use[stage] == position else 0 for position, stage in enumerate(uses)
    ]
    # Backward begins at the last use: at each use, the gradients of all later uses are complete.
    return [*accumulate(reversed(complete), initial=0)][-2::-1]


def _on_device_bytes(
    held: Sequence[StageBytes], workspaces: int, *, uncut: int, arriving: int
) -> dict[str, int]:
    """Return the bytes of stages in device memory, and of the workspaces of their updates.

    Args:
        held: the stages.
        workspaces: number of fp32 tensors that an update needs beside pieces.
        uncut: elements of the largest parameter that is updated as a whole.
        arriving: bytes of the memory in which summed gradients arrive.
    """
    if not held:
        return {}
    # A batch of pieces ends with the piece that makes it full.
    batch = DEVICE_PIECE_ELEMENTS + max(DEVICE_PIECE_ELEMENTS, uncut)
    batch = min(batch, max(stage.trained for stage in held))
    return {
        "weight store": sum(stage.stored for stage in held),
        "staging": workspaces * batch * _FP32_BYTES + arriving,
    }


def _snapshot_copies(held: Sequence[StageBytes]) -> int:
    """Return the bytes of host memory in which a checkpoint reads stages from device memory."""
    if not held:
        return 0
    per_param = max((stage.state / stage.trained for stage in held if stage.trained), default=0)
    group = GROUP_BYTES + int(DEVICE_PIECE_ELEMENTS * per_param)
    largest = sorted(stage.slab + min(stage.state, group) for stage in held)[-_SNAPSHOT_THREADS:]
    piece = min(DEVICE_PIECE_ELEMENTS, max(stage.trained for stage in held))
    return sum(largest) + len(largest) * piece * _FP32_BYTES


def _holds_exact_gradients(plan: Plan) -> bool:
    """True if the store holds the tensors that autograd made, instead of sums in fp32."""
    return plan.num_micro_batches == 1 and plan.precision.name != "fp16"


def recomputable(trace: Trace) -> list[bool]:
    """Return for each stage if it can be recomputed: if it saves tensors, all within its own module.

    A divided block is recomputed as a whole, or none of its stages is. Its weights may be read in all of its
    modules.
    """
    elsewhere = {
        stage
        for site, stages in trace.sites.items()
        for stage in stages
        if not _is_within(site, stage, trace)
    }
    can_be = [
        cost.recomputable and cost.saved_bytes > 0 and stage not in elsewhere
        for stage, cost in enumerate(trace.costs)
    ]
    for members in trace.members.values():
        whole = any(trace.costs[stage].saved_bytes for stage in members) and all(
            trace.costs[stage].recomputable and stage not in elsewhere for stage in members
        )
        for stage in members:
            can_be[stage] = whole
    return can_be


def _recomputed_block(trace: Trace, stage: int, policy: Activations) -> int | None:
    """Return the divided block that is recomputed with this stage, or `None`."""
    block = trace.blocks[stage]
    return block if policy.is_recomputed and block in trace.members else None


def _is_within(site: str, stage: int, trace: Trace) -> bool:
    """True if a module is that of a stage, or, for a stage of a divided block, a module inside the block."""
    block = trace.blocks[stage]
    name = trace.stages[block].name
    return site == name or (block in trace.members and site.startswith(f"{name}." if name else ""))


def minimum_slabs(trace: Trace, ranks: int = 1) -> int:
    """Return the fewest slabs of a size class that hold all stages bound at once; at least two.

    Args:
        trace: the dry run.
        ranks: number of ranks that share the slabs; each may be at another place in the model.
    """
    most = 2
    for site in trace.sites:
        bound = {stage for module in _enclosing(site) for stage in trace.sites.get(module, ())}
        sizes = Counter(trace.stages[stage].slab_bytes for stage in bound)
        # One more: the backward that starts to recompute a divided block has fetched a weight already.
        most = max(most, *(count + bool(trace.members) for count in sizes.values()))
    alike = max(Counter(stage.slab_bytes for stage in trace.stages).values())
    return max(most, min(ranks * most, alike))


def _enclosing(module: str) -> Iterator[str]:
    """Yield `module` and the modules that contain it, by their qualified names."""
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""


def _counted_bytes(stages: Iterable[StageBytes], share: StoreShare) -> int:
    """Return the bytes of some stages in the weight store that count against a rank's budgets."""
    pairs = [(stage.slab, stage.state) for stage in stages]
    wire, state = sum(slab for slab, _ in pairs), sum(state for _, state in pairs)
    return int(share.wire * wire + share.state * state)


def _stage_bytes(stage: StageSpec, optimizer_state_bytes: int, *, trained: bool) -> StageBytes:
    updated = [param for param in stage.params if trained and param.requires_grad]
    numel = sum(param.numel for param in updated)
    beyond = {Encoding.SAME: 0, Encoding.SPLIT: 2, Encoding.COPY: _FP32_BYTES}
    return StageBytes(
        slab=stage.slab_bytes,
        state=numel * optimizer_state_bytes + sum(p.numel * beyond[encoding_of(p)] for p in stage.params),
        gradient=sum(param.wire_bytes for param in updated),
        gradient_sum=sum(param.numel * max(_FP32_BYTES, param.wire_dtype.itemsize) for param in updated),
        trained=numel,
    )


def _kept(cost: StageCost) -> int:
    return cost.saved_bytes + cost.input_bytes


def offloaded_bytes(cost: StageCost, policy: Activations) -> int:
    """Return the bytes of one stage's activations that a micro-batch moves off the compute device."""
    if policy is Activations.RECOMPUTE_FROM_HOST:
        return cost.input_bytes
    return _kept(cost) if policy is Activations.OFFLOAD else 0


def _held(cost: StageCost, policy: Activations) -> int:
    """Return the bytes of a stage's activations that stay on the compute device from forward to backward."""
    if policy is Activations.KEEP:
        return _kept(cost)
    return cost.input_bytes if policy is Activations.RECOMPUTE else 0


def _moving(moved: int) -> int:
    """Return the most bytes that are in transit or in a writer's buffer if `moved` bytes are offloaded."""
    return min(moved, OFFLOAD_WINDOW_BYTES) + OFFLOAD_WRITERS * min(moved, OFFLOAD_BLOCK_BYTES)


def _passing(cost: StageCost) -> int:
    return cost.transient_bytes + cost.input_bytes + cost.output_bytes


def _busy(cost: StageCost, policy: Activations, num_uses: int) -> int:
    """Return the bytes of tensors that exist only during a use, such as the gradients of its outputs."""
    passing = _passing(cost)
    if policy.is_recomputed:
        return passing + cost.saved_bytes // num_uses
    if policy is Activations.OFFLOAD:  # the activations that one operator's backward has brought back
        return passing + min(cost.transient_bytes, _kept(cost) // num_uses)
    return passing


@lru_cache(maxsize=4096)
def _pool_bytes(slab_sizes: tuple[int, ...], slabs: int) -> int:
    return sum(size * count for size, count in slab_capacity(slab_sizes, slabs).items())
