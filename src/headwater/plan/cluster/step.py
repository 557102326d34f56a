"""One optimizer step of all ranks, from commit to commit: the plan's schedule on the cluster's resources.

The ranks of one host are simulated, and that host's memory, disk and links; the other hosts do the same at
the same time. At a commit nothing is under way, so that every step is like the one that is simulated.
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
"""Uses by which updates and broadcasts are ahead of the computation, at most."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A simulated step.

    Attributes:
        timeline: everything that happens.
        ranks: what computes, by rank of a host.
        step_s: how long it takes.
    """

    timeline: Timeline
    ranks: tuple[int, ...]
    step_s: float


def simulate_step(plan: Plan, predictor: Predictor, placement: Placement) -> Step:
    """Replay one step.

    Args:
        plan: of one rank, made for its part of the batch.
        predictor: of the plan's trace, with the rates of one rank.
        placement: where the ranks are.
    """
    replayed = _Replay(plan, predictor, placement)
    replayed.run()
    timeline = replayed.timeline
    return Step(timeline, tuple(replayed.ranks), timeline.end_s)


class _Replay:
    """Gives the tasks of a step to the resources, in the order in which the engine does."""

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
        # What has been given so far
        self._used: list[list[int]] = []  # tasks of every use, by rank
        self._fetches: deque[int] = deque()  # uses whose weights are not on their way yet
        self._arrived: dict[int, list[list[int]]] = {}  # by use: what each rank waits for
        self._whole: dict[int, int] = {}  # by stage: the task after which the host has its updated weights
        self._read: list[list[int]] = [[] for _ in self.ranks]  # reads in place of the last use
        self._moved_out: dict[tuple[int, int], int] = {}  # by stage and rank: activations that have left
        self._turn: dict[int, int] = {}  # by stage: the last addition to its gradients
        self._reduced: list[int] = []

    def run(self) -> None:
        """Give every task of the step."""
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
        """Update a stage before its first use, where that needs no slab, and let its fetch be next."""
        stage = self._schedule[use % len(self._schedule)]
        if self._is_first(use) and not self._owners.need_slabs:
            self._whole[stage] = self._owners.update(stage, after=[])
        self._fetches.append(use)
        self._fetch_what_can_be()

    def _is_first(self, use: int) -> bool:
        return use < self._num_forward and self._footprint.first_use[self._schedule[use]] == use

    def _fetch_what_can_be(self) -> None:
        """Fetch in the order of uses, as slabs become free."""
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
        """The last use of the stage whose slab this one gets; `None` if that was in the step before."""
        distance = self._freed_by.get(use % len(self._schedule))
        return None if distance is None or distance > use else use - distance

    def _fetch(self, use: int, freed: list[list[int]]) -> list[list[int]]:
        """Bring the weights of a use to every rank; what each has to wait for."""
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
        """From the weight store in memory to a slab in memory, by the cores that compute."""
        moved = 2 * self._footprint.stages[stage].slab
        seconds = moved / self._host.memory.bytes_per_s
        held = (self.ranks[rank], self._memory)
        return self.timeline.add(Kind.BROADCAST, "weights to slab", stage, seconds, held, after, moved)

    def _upload(self, stage: int, rank: int, after: list[int]) -> list[int]:
        """From memory over the link of an accelerator."""
        slab = self._footprint.stages[stage].slab
        over_link = self._over_link(Kind.BROADCAST, "weights", stage, slab, self._links_in[rank], after)
        return [over_link, self._memory_task(Kind.BROADCAST, "weights read", stage, slab, after)]

    # use

    def _use(self, use: int) -> None:
        """Compute one use on every rank, and pass on the gradients that are complete with it."""
        self._fetch_what_can_be()
        position = use % len(self._schedule)
        stage, forward = self._schedule[position], position < self._num_forward
        place = position if forward else 2 * self._num_forward - 1 - position
        # Of a stage that is used twice the last use does the work: a tied embedding, mostly, and its head.
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
        """Ranks of a host read the same weights where they lie; the memory serves one after the other."""
        if self._plan.device != "cpu" or not self._trace.costs[stage].flops:
            return []
        before = [self._used[-1][rank]] if self._used else []
        slab = self._footprint.stages[stage].slab
        return [self._memory_task(Kind.COMPUTE, "weights read", stage, slab, [*arrived, *before])]

    # gradients out

    def _gradients(self, micro_batch: int, stage: int, computed: list[int]) -> None:
        """The gradients of a micro-batch: added up by the ranks in turns, then sent to their owners."""
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
        assert self._network is not None, "an accelerator without a link has a network"
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
    """How many uses before each position of a micro-batch the stage was used whose slab is free for it."""
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
