"""Bytes of gradients: those that autograd makes, and those that wait for the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import final

from headwater.plan.memory.stages import StageBytes
from headwater.plan.step_trace import Trace
from headwater.plan.types import Plan, StoreShare
from headwater.store.layout import MOST_AHEAD, MOST_UNFINISHED

_MEETING = 4
"""With several ranks, the most stages whose sums are complete or nearly so, and wait for an event on a rank.

One waits for the last additions, one until all ranks have handed it over, one until all have measured it, and
one for its update.
"""


@final
class GradientMemory:
    """Bytes of the gradients of one dry run's stages, wherever a plan has them.

    The gradients of a stage *arrive* while autograd has begun them, from the stage's last use to its first.
    Then they are *complete*. The store *holds* them until the update. Those of stages in device memory *stay*
    on the device.

    Attributes:
        sums_stay: True if several ranks add to the sums. The sums are then held until all ranks have added.

    Args:
        trace: the dry run.
        stages: bytes of each stage.
        compute_ranks: number of ranks of this host that compute.
        share: the part of the store that counts.
    """

    def __init__(
        self, trace: Trace, stages: Sequence[StageBytes], *, compute_ranks: int, share: StoreShare
    ) -> None:
        self._trace, self._stages = trace, stages
        self._ranks, self._share = compute_ranks, share
        self.sums_stay = compute_ranks + share.store_ranks > 1 or share.sums_stay
        # The search asks for the same tiers of gradients with many numbers of slabs and policies.
        self._known_sums: dict[tuple[tuple[int, ...], bool], int] = {}
        self._known_alive: dict[object, list[int]] = {}

    def held(self, plan: Plan, stage: int) -> int:
        """Return the bytes of one stage's gradients that the store holds from backward to the update."""
        held = self._stages[stage]
        return held.gradient if plan.holds_exact_gradients else held.gradient_sum

    def all_held(self, plan: Plan) -> int:
        """Return the bytes of all gradients that the store holds from the end of backward to the update.

        Those that stay on the device are not counted: see `alive`.
        """
        key = self.staying(plan), plan.holds_exact_gradients
        if key not in self._known_sums:
            stages = set(range(len(self._stages))).difference(self.staying(plan))
            self._known_sums[key] = sum(self.held(plan, stage) for stage in stages)
        return self._known_sums[key]

    def staying(self, plan: Plan) -> tuple[int, ...]:
        """Return the stages whose gradients stay on the device; none if several ranks sum on the host."""
        return () if self.sums_stay else plan.on_device

    def arriving_sums(self, plan: Plan) -> list[int]:
        """Return for each stage in device memory the bytes of sums that a rank copies to its device."""
        stages = plan.on_device if self.sums_stay else ()
        return [self.held(plan, stage) for stage in stages]

    def in_host_memory(self, plan: Plan) -> int:
        """Return the bytes of gradients in host memory if an accelerator computes."""
        staying, on_disk = frozenset(self.staying(plan)), plan.gradient_tier == "disk"
        elsewhere = (stage for index, stage in enumerate(self._stages) if index not in staying)
        largest = max((stage.gradient_sum for stage in elsewhere), default=0)
        # Sums on disk, and sums of several ranks, have a buffer in which each rank's gradients arrive.
        buffers = self._ranks * largest if on_disk or self.sums_stay else 0
        if on_disk:
            return buffers
        held = self.all_held(plan)
        if self._are_freed_early(plan):
            # Gradients that wait to be added to sums have at most as many bytes as the largest stage has.
            held = max(self._waiting_in_backward(plan)) + largest
        return int(self._share.gradients * held) + buffers

    def after_backward(self, plan: Plan) -> int:
        """Return the bytes of gradients in host memory that wait for the update, if a CPU computes."""
        on_disk = plan.gradient_tier == "disk"
        return 0 if on_disk or self._are_freed_early(plan) else self.all_held(plan)

    def _are_freed_early(self, plan: Plan) -> bool:
        """True if updates in backward free the memory of gradients.

        The sums of several ranks stay in memory that is page-locked for stages in device memory.
        """
        return plan.updates_free_gradients and not (self.sums_stay and plan.on_device)

    def alive(self, plan: Plan) -> list[int]:
        """Return the bytes of gradients in the compute device's memory during the backward of each use.

        With one micro-batch the store holds the gradients that are complete. With several it holds all sums,
        and so it does if several ranks add to them. An update frees the gradients of a stage when the next
        forward reaches the stage, so that forward is the mirror image of backward.
        """
        # The key has everything of a plan on which the methods below depend.
        where = plan.device, plan.tier, plan.gradient_tier, plan.in_memory, plan.on_device
        key = where, plan.num_micro_batches, plan.updates, plan.precision.name
        if key not in self._known_alive:
            self._known_alive[key] = self._count_alive(plan)
        return self._known_alive[key]

    def _count_alive(self, plan: Plan) -> list[int]:
        """Return the result of `alive`, without a look into its cache."""
        if plan.device != "cpu":
            return self._alive_on_accelerator(plan)
        if plan.gradient_tier == "disk":
            return self._on_way_to_disk(plan)
        arriving = self._arriving
        if self._are_freed_early(plan):
            return self._waiting_in_backward(plan)
        if plan.num_micro_batches > 1 or self.sums_stay:
            held = self.all_held(plan)
            return [held + self._ranks * count for count in arriving]
        after = self._complete({stage: self.held(plan, stage) for stage in self._trace.first_use})
        return [done + count for done, count in zip(after, arriving, strict=True)]

    def _alive_on_accelerator(self, plan: Plan) -> list[int]:
        """Return the bytes on an accelerator: gradients that arrive, that leave, and that stay.

        Complete gradients leave for the host through copies. Autograd's thread blocks if more bytes wait than
        the gradients of the largest stage have (see `GradientCopies`), so no more than these leave at once.
        """
        staying = {stage: self.held(plan, stage) for stage in self.staying(plan)}
        if plan.num_micro_batches > 1:  # all sums wait
            waiting = [sum(staying.values())] * len(self._trace.uses)
        else:
            waiting = self._complete(staying)
        moments = zip(self._arriving, self._largest_complete, waiting, strict=True)
        return [count + min(count, copied) + held for count, copied, held in moments]

    def _on_way_to_disk(self, plan: Plan) -> list[int]:
        """Return the bytes of gradients that are incomplete, or are being summed and written, at each use."""
        trace, exact = self._trace, plan.holds_exact_gradients
        found = []
        for position, (stage, begun) in enumerate(zip(trace.uses, self._begun, strict=True)):
            held, complete = self._stages[stage], 0
            if trace.first_use[stage] == position:
                # Exact: the copy that is written. Otherwise: the old sum and the new one.
                complete = held.gradient if exact else 2 * held.gradient_sum
            found.append((self._ranks + self._share.store_ranks) * (begun + complete))
        return found

    @cached_property
    def _largest_complete(self) -> list[int]:
        """Bytes of gradients of the largest stage that is complete in the backward of each use."""
        trace = self._trace
        complete = [
            self._stages[stage].gradient if trace.first_use[stage] == position else 0
            for position, stage in enumerate(trace.uses)
        ]
        # Backward begins at the last use, so this is the maximum over each use and all later ones.
        return [*accumulate(reversed(complete), max)][::-1]

    @cached_property
    def _arriving(self) -> list[int]:
        """Bytes of gradients that autograd has begun but not handed over, in the backward of each use."""
        trace, found = self._trace, []
        for position, (stage, begun) in enumerate(zip(trace.uses, self._begun, strict=True)):
            second = trace.first_use[stage] == position < trace.last_use[stage]
            # The gradient of the first use is a new summand beside the sum of the later uses.
            found.append(begun + (self._stages[stage].gradient if second else 0))
        return found

    @cached_property
    def _begun(self) -> list[int]:
        """Bytes of gradients, without new summands, between the last and the first use of their stages."""
        # A running sum of changes is fast: a model of thousands of stages is planned for thousands of plans.
        changes = [0] * (len(self._trace.uses) + 1)
        for stage, first in self._trace.first_use.items():
            changes[first] += self._stages[stage].gradient
            changes[self._trace.last_use[stage] + 1] -= self._stages[stage].gradient
        return [*accumulate(changes)][:-1]

    def _waiting_in_backward(self, plan: Plan) -> list[int]:
        """Return the bytes of gradients in host memory during each use, if updates run in backward.

        An update frees the gradients of a stage while the backward continues. Beside the gradients that
        arrive, those of the last complete stage wait until the backward reaches another stage. If a thread
        updates, those of the stages before it may wait too (`MOST_UNFINISHED`). With several ranks, so may
        those of stages that the slowest rank still needs (`MOST_AHEAD`), those that wait in a queue to be
        added, and those that all ranks must measure before they update them (`_MEETING`). The sum to which
        gradients are added has its own memory.
        """
        trace, ranks = self._trace, self._ranks
        on_thread = plan.device != "cpu" or plan.on_disk
        most = 1 + (MOST_UNFINISHED if on_thread else 0) + (MOST_AHEAD + _MEETING if self.sums_stay else 0)
        waiting, complete = [0] * len(trace.uses), list[int]()
        for position in reversed(range(len(trace.uses))):
            stage = trace.uses[position]
            begun = self.held(plan, stage) if self.sums_stay else 0
            waiting[position] = sum(complete[-most:]) + begun + ranks * self._arriving[position]
            if trace.first_use[stage] == position:
                complete.append(0 if stage in plan.on_device else self.held(plan, stage))
        return waiting

    def _complete(self, sizes: Mapping[int, int]) -> list[int]:
        """Return for each use the bytes of the gradients that are complete when its backward begins.

        Args:
            sizes: stage -> bytes of its gradients, for the stages that count.
        """
        first_use = self._trace.first_use
        complete = [
            sizes.get(stage, 0) if first_use[stage] == position else 0
            for position, stage in enumerate(self._trace.uses)
        ]
        # Backward begins at the last use: at each use, the gradients of all later uses are complete.
        return [*accumulate(reversed(complete), initial=0)][-2::-1]
