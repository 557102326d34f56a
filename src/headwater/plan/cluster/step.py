"""One optimizer step of all ranks, from commit to commit: the plan's schedule on the cluster's resources.

One host is simulated, with its ranks, memory, disk and links. The other hosts do the same at the same time.
At a commit nothing is in progress, so every step is like the simulated one.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from itertools import pairwise

from headwater.plan.belady import CachePolicy, replay, slab_capacity
from headwater.plan.cluster.disk import DiskQueue
from headwater.plan.cluster.network import Links, connect
from headwater.plan.cluster.owners import Owners
from headwater.plan.cluster.timeline import Kind, Timeline
from headwater.plan.cluster.types import Placement
from headwater.plan.footprint import offloaded_bytes
from headwater.plan.predict import USE_OVERHEAD_S, Predictor
from headwater.plan.types import Plan

UPDATES_AHEAD = 4
"""How many uses updates and broadcasts may be ahead of the computation."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A simulated step.

    Attributes:
        timeline: all tasks.
        ranks: resource of each rank of a host.
        step_s: its duration.
    """

    timeline: Timeline
    ranks: tuple[int, ...]
    step_s: float


def simulate_step(plan: Plan, predictor: Predictor, placement: Placement) -> Step:
    """Simulate one step.

    Args:
        plan: of one rank, made for its part of the batch.
        predictor: of the plan's trace, with the rates of one rank.
        placement: where the ranks are.

    Returns:
        The step.
    """
    replayed = _Replay(plan, predictor, placement)
    replayed.run()
    timeline = replayed.timeline
    return Step(timeline, tuple(replayed.ranks), timeline.end_s)


class _Replay:
    """Adds the tasks of a step to the resources, in the order in which the engine starts them."""

    def __init__(self, plan: Plan, predictor: Predictor, placement: Placement) -> None:
        self.timeline = timeline = Timeline()
        self.ranks = [timeline.resource("host", f"rank {rank}") for rank in range(placement.ranks)]
        self._plan, self._predictor, self._placement = plan, predictor, placement
        self._host = placement.cluster.host
        self._footprint = predictor.footprint
        self._trace = plan.trace
        self._links_in: list[int] = []
        self._links_out: list[int] = []
        accelerator = self._host.accelerator
        if accelerator is not None and accelerator.link_bytes_per_s is not None:
            self._links_in = [timeline.resource("host", f"link {r} in") for r in range(placement.ranks)]
            self._links_out = [timeline.resource("host", f"link {r} out") for r in range(placement.ranks)]
        self._cores = self.ranks if accelerator is None else []
        self._memory = timeline.resource("host", "memory")
        self._disk = DiskQueue(timeline, "host", self._host.disk)
        self._network: Links | None = connect(timeline, placement)
        self._owners = Owners(
            timeline, plan, predictor, placement, self._network, self._cores, self._memory, self._disk
        )
        self._seconds = predictor.stage_seconds(plan)
        self._num_forward = len(self._trace.uses)
        self._schedule = self._trace.schedule
        self._missed = set(predictor.missed(plan))
        self._freed_by = _freed_by(plan) if self._missed else {}
        # State of the simulation:
        self._used: list[list[int]] = []  # tasks of every use, by rank
        self._fetches: deque[int] = deque()  # uses whose fetch has not begun
        self._arrived: dict[int, list[list[int]]] = {}  # by use: tasks that each rank waits for
        self._whole: dict[int, int] = {}  # by stage: the task after which the host has its updated weights
        self._read: list[list[int]] = [[] for _ in self.ranks]  # by rank: the last use's reads in place
        self._moved_out: dict[tuple[int, int], int] = {}  # by stage and rank: activations moved out
        self._turn: dict[int, int] = {}  # by stage: the last addition to its gradients
        self._reduced: list[int] = []

    def run(self) -> None:
        """Add every task of the step."""
        total = self._plan.num_micro_batches * len(self._schedule)
        for use in range(total + UPDATES_AHEAD):
            if use < total:
                self._supply(use)
            if use >= UPDATES_AHEAD:
                self._use(use - UPDATES_AHEAD)
        if self._network is not None:
            self.timeline.add(Kind.REDUCE, "norm", -1, self._network.agreement_s, after=self._reduced)

    # weights in

    def _supply(self, use: int) -> None:
        """Update a stage before its first use, unless that needs a slab, and queue its fetch."""
        stage = self._schedule[use % len(self._schedule)]
        if self._is_first(use) and not self._owners.need_slabs:
            self._whole[stage] = self._owners.update(stage, after=[])
        self._fetches.append(use)
        self._fetch_what_can_be()

    def _is_first(self, use: int) -> bool:
        return use < self._num_forward and self._footprint.first_use[self._schedule[use]] == use

    def _fetch_what_can_be(self) -> None:
        """Begin fetches in the order of uses, as slabs become free."""
        while self._fetches:
            use = self._fetches[0]
            before = self._use_that_frees(use)
            if before is not None and before >= len(self._used):
                return
            self._fetches.popleft()
            freed = (
                [[tasks] for tasks in self._used[before]] if before is not None else [[] for _ in self.ranks]
            )
            self._arrived[use] = self._fetch(use, freed)

    def _use_that_frees(self, use: int) -> int | None:
        """Return the last use of the stage whose slab this use gets; `None` if it was a step earlier."""
        distance = self._freed_by.get(use % len(self._schedule))
        return None if distance is None or distance > use else use - distance

    def _fetch(self, use: int, freed: list[list[int]]) -> list[list[int]]:
        """Bring the weights of a use to every rank; return the tasks that each rank waits for."""
        stage = self._schedule[use % len(self._schedule)]
        slab = self._footprint.stages[stage].slab
        everywhere = [task for tasks in freed for task in tasks]
        if self._is_first(use) and self._owners.need_slabs:
            self._whole[stage] = self._owners.update(stage, after=everywhere)
        whole = [self._whole[stage]] if self._whole.get(stage, -1) >= 0 else []
        again = use % len(self._schedule) in self._missed
        moves = again or (
            self._is_first(use) and not self._plan.in_place and self._footprint.stages[stage].trained > 0
        )
        if not moves:
            return [whole for _ in self.ranks]
        if self._placement.streams_from_store:
            assert self._network is not None, "weights stream over it"
            return [[self._network.broadcast(stage, slab, [*whole, *everywhere])] for _ in self.ranks]
        from_disk = self._plan.tier == "disk"
        updated = self._is_first(use) and self._owners.need_slabs and self._footprint.stages[stage].trained
        if from_disk and not updated:
            whole = [*whole, self._disk.read("weights", stage, slab, everywhere)]
        if self._plan.device == "cpu":
            return [
                whole if from_disk else [self._copy(stage, rank, [*whole, *f])]
                for rank, f in enumerate(freed)
            ]
        return [self._upload(stage, rank, [*whole, *f]) for rank, f in enumerate(freed)]

    def _copy(self, stage: int, rank: int, after: list[int]) -> int:
        """Copy a stage from the weight store in memory to a slab, by the cores that compute."""
        moved = 2 * self._footprint.stages[stage].slab
        seconds = moved / self._host.memory.bytes_per_s
        held = (self.ranks[rank], self._memory)
        return self.timeline.add(Kind.BROADCAST, "weights to slab", stage, seconds, held, after, moved)

    def _upload(self, stage: int, rank: int, after: list[int]) -> list[int]:
        """Copy a stage from memory to an accelerator."""
        slab = self._footprint.stages[stage].slab
        over_link = self._over_link(Kind.BROADCAST, "weights", stage, slab, self._links_in[rank], after)
        return [over_link, self._memory_task(Kind.BROADCAST, "weights read", stage, slab, after)]

    # use

    def _use(self, use: int) -> None:
        """Compute one use on every rank, and send the gradients that it completes."""
        self._fetch_what_can_be()
        position = use % len(self._schedule)
        stage, forward = self._schedule[position], position < self._num_forward
        place = position if forward else 2 * self._num_forward - 1 - position
        # For a stage that is used twice the last use does the work: usually a tied embedding and its head.
        works = place == self._footprint.last_use[stage]
        whole = self._seconds[stage].forward if forward else self._seconds[stage].backward
        seconds = USE_OVERHEAD_S + (whole if works else 0.0)
        arrived = self._arrived.pop(use)
        tasks = []
        for rank, resource in enumerate(self.ranks):
            after = [*arrived[rank], *self._read[rank]]
            self._read[rank] = self._read_in_place(stage, rank, arrived[rank]) if works else []
            if works and not forward:
                after += self._bring_back(stage, rank)
            name = "forward" if forward else "backward"
            task = self.timeline.add(Kind.COMPUTE, name, stage, seconds, (resource,), after)
            if works and forward:
                self._move_out(stage, rank, task)
            tasks.append(task)
        self._used.append(tasks)
        if not forward and place == self._footprint.first_use[stage]:
            self._gradients(use // len(self._schedule), stage, tasks)

    def _read_in_place(self, stage: int, rank: int, arrived: list[int]) -> list[int]:
        """Add the reads of weights in place. The ranks of a host share the rate of its memory."""
        if self._plan.device != "cpu" or not self._trace.costs[stage].flops:
            return []
        before = [self._used[-1][rank]] if self._used else []
        slab = self._footprint.stages[stage].slab
        return [self._memory_task(Kind.COMPUTE, "weights read", stage, slab, [*arrived, *before])]

    # gradients out

    def _gradients(self, micro_batch: int, stage: int, computed: list[int]) -> None:
        """Add the gradients of a micro-batch: each rank adds its own, then the sum is sent to the owners."""
        held = self._footprint.stages[stage]
        if not held.trained:
            return
        last = micro_batch == self._plan.num_micro_batches - 1
        summed = self._footprint.held_gradient(self._plan, stage)
        turns = []
        for rank, task in enumerate(computed):
            done = task
            if self._links_out:
                done = self._over_link(
                    Kind.REDUCE, "gradients", stage, held.gradient, self._links_out[rank], [task]
                )
            if len(self.ranks) > 1:
                first = micro_batch == 0 and rank == 0
                before = [self._turn[stage]] if stage in self._turn else []
                cores = tuple(self._cores[rank : rank + 1])
                moved = held.gradient + (1 if first else 2) * summed
                done = self._memory_task(Kind.REDUCE, "gradients added", stage, moved, [done, *before], cores)
                self._turn[stage] = done
            turns.append(done)
        after = (
            [self._owners.keep(stage, micro_batch, turns)] if self._plan.gradient_tier == "disk" else turns
        )
        if self._network is not None and (last or self._placement.streams_from_store):
            after = [self._network.reduce(stage, held.gradient, after)]
        self._reduced += after if last else []

    # activations

    def _move_out(self, stage: int, rank: int, computed: int) -> None:
        moved = offloaded_bytes(self._trace.costs[stage], self._plan.activations[stage])
        if not moved:
            return
        if self._plan.device == "cpu":
            self._moved_out[stage, rank] = self._disk.write(
                "activations", stage, moved, [computed], Kind.OFFLOAD
            )
        else:
            self._moved_out[stage, rank] = self._over_link(
                Kind.OFFLOAD, "activations", stage, moved, self._way_out(rank), [computed]
            )

    def _bring_back(self, stage: int, rank: int) -> list[int]:
        if (stage, rank) not in self._moved_out:
            return []
        moved = offloaded_bytes(self._trace.costs[stage], self._plan.activations[stage])
        after = [self._moved_out.pop((stage, rank))]
        if self._plan.device == "cpu":
            return [self._disk.read("activations", stage, moved, after, Kind.OFFLOAD)]
        way = self._links_in[rank] if self._links_in else self._network_way().into
        return [self._over_link(Kind.OFFLOAD, "activations", stage, moved, way, after)]

    def _way_out(self, rank: int) -> int:
        return self._links_out[rank] if self._links_out else self._network_way().out

    def _network_way(self) -> Links:
        assert self._network is not None, "an accelerator without a link is on the network"
        return self._network

    # moving bytes

    def _over_link(self, kind: Kind, name: str, stage: int, moved: int, link: int, after: list[int]) -> int:
        assert self._placement.link_bytes_per_s is not None, "accelerators have links"
        seconds = moved / self._placement.link_bytes_per_s
        return self.timeline.add(kind, name, stage, seconds, (link,), after, moved)

    def _memory_task(
        self,
        kind: Kind,
        name: str,
        stage: int,
        moved: int,
        after: list[int],
        cores: tuple[int, ...] = (),
    ) -> int:
        seconds = moved / self._host.memory.bytes_per_s
        return self.timeline.add(kind, name, stage, seconds, (*cores, self._memory), after, moved)


def _freed_by(plan: Plan) -> dict[int, int]:
    """Return for each position how many uses earlier the stage was used whose slab it takes."""
    schedule = plan.trace.schedule
    sizes = [stage.slab_bytes for stage in plan.trace.stages]
    policy = CachePolicy(schedule, sizes, slab_capacity(sizes, plan.slabs))
    uses = list(replay(policy, rounds=2))
    distances = {}
    for index, (before, use) in enumerate(pairwise(uses), start=1):
        gone = before.resident - use.resident
        if index >= len(schedule) and gone:
            (victim,) = gone
            last = next(other for other in range(index - 1, -1, -1) if uses[other].stage == victim)
            distances[use.position] = index - last
    return distances
