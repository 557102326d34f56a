"""Weights on their way in: updates of stages, and fetches in the order of their uses."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import final

from headwater.plan.belady import replay, slab_policy, slab_positions
from headwater.plan.cluster.host import HostResources
from headwater.plan.cluster.owners import Owners
from headwater.plan.cluster.timeline import Kind
from headwater.plan.predict import Predictor
from headwater.plan.types import Plan


@final
class WeightsIn:
    """Tasks that fetch weights. A fetch begins as soon as the slab that it needs is free.

    Args:
        plan: the plan of one rank.
        predictor: the predictor of the plan's trace.
        host: the resources.
        owners: the ranks that update the weights.
    """

    def __init__(self, plan: Plan, predictor: Predictor, host: HostResources, owners: Owners) -> None:
        self._plan, self._footprint = plan, predictor.footprint
        self._host, self._owners = host, owners
        self._schedule = plan.schedule
        self._on_disk = frozenset(plan.on_disk)
        self._missed = set(predictor.missed(plan))
        self._freed_by = freed_by(plan) if self._missed else {}
        self._used: list[list[int]] = []  # tasks of every use, by rank
        self._fetches: deque[int] = deque()  # uses whose fetch has not begun
        self._arrived: dict[int, list[list[int]]] = {}  # by use: tasks that each rank waits for
        self._whole: dict[int, int] = {}  # by stage: the task after which the host has its updated weights

    def supply(self, use: int) -> None:
        """Queue the fetch for a use. For a stage's first use, add its update too, if that needs no slab."""
        stage = self._stage(use)
        before = self._plan.updates == "on_fetch" and not self._owners.needs_slab(stage)
        if self._is_first(use) and before:
            self._whole[stage] = self._owners.update(stage, after=[])
        # The queue keeps fetches in the order of uses: a later one must not take the slab of an earlier one.
        self._fetches.append(use)
        self._begin_fetches()

    def take(self, use: int) -> list[list[int]]:
        """Return by rank the tasks that the computation of this use waits for."""
        self._begin_fetches()
        return self._arrived.pop(use)

    def release(self, computed: list[int]) -> None:
        """Record that a use has been computed, so that its slab is free for a later fetch.

        Args:
            computed: the task that computes the use, by rank.
        """
        self._used.append(computed)

    def last_use(self, rank: int) -> list[int]:
        """Return the task of a rank's last use so far, in a list; an empty list before the first use."""
        return [self._used[-1][rank]] if self._used else []

    def _stage(self, use: int) -> int:
        return self._schedule[use % len(self._schedule)]

    def _is_first(self, use: int) -> bool:
        stage = self._stage(use)
        return use < len(self._plan.trace.uses) and self._plan.trace.first_use[stage] == use

    def _begin_fetches(self) -> None:
        """Add queued fetches in order, until one needs a slab whose last use has not been added yet."""
        while self._fetches:
            use = self._fetches[0]
            before = self._use_that_frees(use)
            if before is not None and before >= len(self._used):
                return
            self._fetches.popleft()
            freed = (
                [[task] for task in self._used[before]]
                if before is not None
                else [[] for _ in self._host.ranks]
            )
            self._arrived[use] = self._fetch(use, freed)

    def _use_that_frees(self, use: int) -> int | None:
        """Return the use after which the slab for `use` is free; `None` if it was in an earlier step."""
        distance = self._freed_by.get(use % len(self._schedule))
        return None if distance is None or distance > use else use - distance

    def _fetch(self, use: int, freed: list[list[int]]) -> list[list[int]]:
        """Add the tasks that bring the weights of a use to the ranks; return by rank those to wait for."""
        stage = self._stage(use)
        everywhere = [task for tasks in freed for task in tasks]
        into_slab = self._is_first(use) and self._owners.needs_slab(stage)
        if into_slab:
            self._whole[stage] = self._owners.update(stage, after=everywhere)
        whole = [self._whole[stage]] if self._whole.get(stage, -1) >= 0 else []
        if not self._moves(use):
            return [whole for _ in freed]
        if self._host.machines.streams_from_store:
            return self._broadcast(stage, [*whole, *everywhere])
        if stage in self._on_disk:
            # An update into a slab leaves the new weights there, so these are not read from disk again.
            if not (into_slab and self._is_trained(stage)):
                slab = self._footprint.stages[stage].slab
                whole = [*whole, self._host.disk.read("weights", stage, slab, everywhere)]
            if self._plan.device == "cpu":
                return [whole for _ in freed]
        bring = self._copy if self._plan.device == "cpu" else self._upload
        return [bring(stage, rank, [*whole, *tasks]) for rank, tasks in enumerate(freed)]

    def _is_trained(self, stage: int) -> bool:
        return self._footprint.stages[stage].trained > 0

    def _moves(self, use: int) -> bool:
        """True if weights move to the ranks: no slab has them, or an update has changed them."""
        if use % len(self._schedule) in self._missed:
            return True
        stage = self._stage(use)
        is_read_in_place = stage in self._plan.read_in_place
        return self._is_first(use) and not is_read_in_place and self._is_trained(stage)

    def _broadcast(self, stage: int, after: list[int]) -> list[list[int]]:
        """Add the transfers of a stage over the network, one to each rank; return their tasks by rank."""
        network, slab = self._host.network, self._footprint.stages[stage].slab
        assert network is not None, "weights stream over it"
        return [[network.broadcast(stage, slab, after)] for _ in self._host.ranks]

    def _copy(self, stage: int, rank: int, after: list[int]) -> list[int]:
        """Add the copy of a stage from memory to a slab, by the cores that compute; return its tasks."""
        moved, core = 2 * self._footprint.stages[stage].slab, (self._host.ranks[rank],)
        return [self._host.use_memory(Kind.BROADCAST, "weights to slab", stage, moved, after, core)]

    def _upload(self, stage: int, rank: int, after: list[int]) -> list[int]:
        """Add the copy of a stage from memory to an accelerator; return its tasks."""
        slab, link = self._footprint.stages[stage].slab, self._host.links_in[rank]
        over_link = self._host.send(Kind.BROADCAST, "weights", stage, slab, link, after)
        return [over_link, self._host.use_memory(Kind.BROADCAST, "weights read", stage, slab, after)]


def freed_by(plan: Plan) -> dict[int, int]:
    """Return, for each use that evicts a stage, how many uses earlier that stage was last used."""
    schedule, in_place = plan.schedule, plan.read_in_place
    sizes = [stage.slab_bytes for stage in plan.trace.stages]
    uses = list(replay(slab_policy(schedule, sizes, plan.slabs, in_place), rounds=2))
    positions = slab_positions(schedule, in_place)
    at = [*positions, *(len(schedule) + position for position in positions)]  # position of each use
    distances = {}
    for index, (before, use) in enumerate(pairwise(uses), start=1):
        gone = before.resident - use.resident
        # Only the second step counts: the first begins with empty slabs and evicts less.
        if index >= len(positions) and gone:
            (victim,) = gone
            last = next(other for other in range(index - 1, -1, -1) if uses[other].stage == victim)
            distances[positions[use.position]] = at[index] - at[last]
    return distances
