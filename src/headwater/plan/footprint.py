"""The peak bytes of a plan on the device, in host memory and on disk."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, final

from headwater.plan.memory.activations import activations_alive, all_offloaded_bytes
from headwater.plan.memory.device import store_on_device
from headwater.plan.memory.gradients import GradientMemory
from headwater.plan.memory.masks import mask_bytes, masking_bytes
from headwater.plan.memory.process import ProcessParts
from headwater.plan.memory.slabs import pool_bytes, sizes_in_slabs
from headwater.plan.memory.snapshots import SnapshotMemory
from headwater.plan.memory.stages import first_to_memory, largest_state_of_an_element, stages_of
from headwater.plan.memory.store import StoreMemory
from headwater.plan.memory.updates import update_space
from headwater.plan.step_trace import Trace
from headwater.plan.types import ONE_MODEL, WHOLE_STORE, Plan, ProcessMemory, StoreShare

if TYPE_CHECKING:
    from headwater.optim.spec import UpdateKind

# Bytes that the allocator holds beside the tensors, as a share of the tensors' bytes. There are three
# allocators on a CPU: malloc that returns freed pages, ranges, and malloc that keeps pages. The last share
# is of the bytes of activations only. On a GPU torch's allocator has segments that grow, or segments of fixed
# sizes; the share of fixed segments was not measured.
_SHARE_OF_MALLOC, _SHARE_OF_RANGES, _SHARE_OF_KEPT_PAGES = 0.2, 0.09, 0.18
_SHARE_OF_GROWING_SEGMENTS, _SHARE_OF_FIXED_SEGMENTS = 0.06, 0.2


@dataclasses.dataclass(frozen=True)
class Peak:
    """Bytes of activations and gradients on the compute device, when their sum is largest in a step.

    If the allocator keeps the pages of freed tensors, the pages of activations stay after the backward,
    beside the gradients that wait for the update.

    Attributes:
        activations: bytes of activations.
        gradients: bytes of gradients.
        masking: bytes for the choice of masks, if memory is fullest at that moment.
        keeps_pages: True if malloc keeps the pages of freed tensors; see `Plan.memory_is_ample`.
        ranges: True if the tensors have their memory in ranges that grow; see `Plan.ranges`.
        on_gpu: True if the tensors are on a GPU.
    """

    activations: int
    gradients: int
    masking: int = 0
    keeps_pages: bool = False
    ranges: bool = False
    on_gpu: bool = False

    @property
    def allocator(self) -> int:
        """Bytes that the allocator holds beside the tensors: gaps, and scratch memory of kernels."""
        if self.keeps_pages:
            return int(self.activations * _SHARE_OF_KEPT_PAGES)
        growing, fixed = _SHARE_OF_RANGES, _SHARE_OF_MALLOC
        if self.on_gpu:
            growing, fixed = _SHARE_OF_GROWING_SEGMENTS, _SHARE_OF_FIXED_SEGMENTS
        share = growing if self.ranges else fixed
        return int((self.activations + self.gradients + self.masking) * share)

    @property
    def total(self) -> int:
        """Bytes of tensors and of the allocator."""
        return self.activations + self.gradients + self.masking + self.allocator

    @property
    def parts(self) -> dict[str, int]:
        """The parts of `total`, by name."""
        found = {"activations": self.activations, "gradients": self.gradients, "allocator": self.allocator}
        return found | ({"masking": self.masking} if self.masking else {})


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of device memory, host memory and disk, by purpose. On CPU, all memory is host memory."""

    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]


@final
class Footprint:
    """Adds up the bytes of plans for one trace. The package `plan/memory` counts each of its parts.

    Attributes:
        trace: the dry run.
        share: the part of the store that counts.
        stages: bytes of each stage.
        slab_sizes: bytes of the weights of each stage in a slab.
        gradients: bytes of gradients.

    Args:
        trace: the dry run.
        optimizer_state_bytes: bytes of optimizer state for each trained parameter.
        update_kind: how the optimizer updates on the device.
        base_bytes: resident host memory of the interpreter and its libraries.
        checkpoints: True if the store is saved during training.
        share: the part of the store that counts.
        ranks: number of ranks on this host. They share the host's memory.
        process: memory of each rank that belongs to its models and data workers.
    """

    def __init__(
        self,
        trace: Trace,
        *,
        optimizer_state_bytes: float,
        base_bytes: int,
        update_kind: UpdateKind = "fused",
        checkpoints: bool = True,
        share: StoreShare = WHOLE_STORE,
        ranks: int = 1,
        process: ProcessMemory = ONE_MODEL,
    ) -> None:
        self.trace, self.share = trace, share
        self.stages = stages_of(trace, optimizer_state_bytes)
        self.slab_sizes = tuple(stage.slab for stage in self.stages)
        self._compute_ranks = ranks - share.store_ranks
        self._process = ProcessParts(process, base_bytes, ranks)
        # A store rank has an interpreter too, but no data workers.
        self._programs = {
            "interpreter": self._process.program,
            "data workers": self._compute_ranks * process.workers,
        }
        if masks := mask_bytes(trace):
            self._programs["masks"] = ranks * masks
        of_an_element = largest_state_of_an_element(self.stages)
        self._masking = masking_bytes(trace, of_an_element, self._compute_ranks)
        self._update_space = update_space(trace, optimizer_state_bytes, update_kind)
        self._store = StoreMemory(
            self.stages,
            share=share,
            compute_ranks=self._compute_ranks,
            update_tensors=self._update_space.host_tensors,
        )
        self._snapshots = SnapshotMemory(trace, self.stages) if checkpoints and not trace.inference else None
        self.gradients = GradientMemory(trace, self.stages, compute_ranks=self._compute_ranks, share=share)
        self._peaks: dict[object, Peak] = {}
        # The search asks for the same policies with thousands of mixes of tiers.
        self._activations_alive = functools.cache(functools.partial(activations_alive, trace))
        self._all_offloaded_bytes = functools.cache(functools.partial(all_offloaded_bytes, trace))

    @functools.cached_property
    def first_to_memory(self) -> list[int]:
        """The stages in the order in which they move from disk to memory."""
        return first_to_memory(self.stages)

    def memory(self, plan: Plan) -> Memory:
        """Return the peak bytes of `plan` in each kind of memory."""
        compute = {"slabs": self._slabs(plan)} | self._store_on_device(plan) | self.peak(plan).parts
        snapshot = 0 if self._snapshots is None else self._snapshots.of(plan)
        host = self._programs | self._store.in_host_memory(plan) | {"snapshot": snapshot}
        disk, moved = self._store.on_disk(plan), self.offloaded_bytes(plan)
        if plan.gradient_tier == "disk":
            disk |= {"gradients": self.gradients.all_held(plan)}
        if plan.device == "cpu":  # its memory is host memory, and activations are offloaded to disk
            return Memory({}, self._in_host_memory(host | compute, plan), disk | {"activations": moved})
        gradients = self.gradients.in_host_memory(plan)
        host |= {"gradients": gradients, "activations": self._compute_ranks * moved}
        if masking := max(self._masking):
            host["masking"] = masking
        on_device = self._process.with_others(compute, on_device=True)
        return Memory(on_device, self._in_host_memory(host, plan), disk)

    def _in_host_memory(self, parts: dict[str, int], plan: Plan) -> dict[str, int]:
        """Return the bytes of host memory, with those of other moments than the steps of `plan`."""
        if self._process.has_initial_weights:  # otherwise the search would sum all stages for each plan
            in_step = sum(size for part, size in parts.items() if part not in self._programs)
            values = [self.stages[stage].values for stage in plan.in_host_memory]
            parts = self._process.with_initial_weights(parts, values, in_step)
        return self._process.with_others(parts, on_device=False)

    def peak(self, plan: Plan) -> Peak:
        """Return the bytes of activations and gradients on the compute device, when their sum is largest."""
        keeps_pages = plan.device == "cpu" and plan.memory_is_ample and not plan.ranges
        # The key has everything on which a peak depends. The search needs the same peak many times.
        where = plan.device, plan.tier, plan.gradient_tier, plan.in_memory, plan.on_device
        key = plan.activations, where, plan.num_micro_batches, plan.updates, plan.ranges, keeps_pages
        if key not in self._peaks:
            ranks, gradients = self._ranks_beside(plan), self.gradients.alive(plan)
            activations = [ranks * alive for alive in self._activations_alive(plan.activations)]
            moments = [(alive, held, 0) for alive, held in zip(activations, gradients, strict=True)]
            if plan.device == "cpu":
                moments += self._masking_moments(plan)
            # The allocator's part grows with the tensors, so the total is largest when the tensors are.
            largest = max(moments, key=sum)
            peak = Peak(*largest, ranges=plan.ranges, on_gpu=plan.device != "cpu")
            if keeps_pages:
                held = max(peak.gradients, self.gradients.after_backward(plan))
                kept = max(activations)
                masking = max(0, *(masking for _, _, masking in moments)) - kept
                peak = Peak(kept, held, max(0, masking), keeps_pages=True)
            self._peaks[key] = peak
        return self._peaks[key]

    def _masking_moments(self, plan: Plan) -> list[tuple[int, int, int]]:
        """Return the bytes of activations, gradients and masking at the moments when masks are chosen."""
        if not self._masking.first:
            return []
        held = self.gradients.after_backward(plan)
        if plan.gradient_tier == "disk":  # the gradients of one stage at a time are read
            held = self._compute_ranks * max(stage.gradient_sum for stage in self.stages)
        return [(0, 0, self._masking.first), (0, held, self._masking.in_step)]

    def held_by_others(self, plan: Plan) -> int:
        """Return the bytes of the compute memory that other models occupy during steps of `plan`."""
        return self._process.held_by_others(on_device=plan.device != "cpu")

    def sizes_in_slabs(self, plan: Plan) -> tuple[int, ...]:
        """Return the bytes of the weights of each stage that is copied to a slab, in the order of stages."""
        return sizes_in_slabs(self.slab_sizes, plan.read_in_place)

    def offloaded_bytes(self, plan: Plan) -> int:
        """Return the bytes of all stages' activations that one micro-batch moves off the compute device."""
        return self._all_offloaded_bytes(plan.activations)

    def disk_readers(self, plan: Plan) -> int:
        """Return the number of ranks that each read the same weights from the disk."""
        return 1 if plan.device == "cpu" else self._compute_ranks

    def _slabs(self, plan: Plan) -> int:
        """Return the bytes of all slabs in the memory of the device."""
        pool = pool_bytes(self.sizes_in_slabs(plan), plan.slabs)
        return pool if plan.shares_slabs else pool * self._ranks_beside(plan)

    def _ranks_beside(self, plan: Plan) -> int:
        """Return how many ranks compute in the same memory. An accelerator has one rank."""
        return self._compute_ranks if plan.device == "cpu" else 1

    def _store_on_device(self, plan: Plan) -> dict[str, int]:
        """Return the bytes of the stages in device memory, and of the memory that their updates need."""
        return store_on_device(
            [self.stages[stage] for stage in plan.on_device],
            self._update_space.device_tensors,
            uncut=max((self._update_space.uncut[stage] for stage in plan.on_device), default=0),
            arriving=max(self.gradients.arriving_sums(plan), default=0),
        )
