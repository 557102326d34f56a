"""One optimizer step of all ranks, from commit to commit: the plan's schedule on the cluster's resources.

One host is simulated, with its ranks, memory, disk and links. The other hosts do the same at the same time.
At a commit nothing is in progress, so every step is like the simulated one.
"""

from __future__ import annotations

import dataclasses
from typing import final

from headwater.plan.cluster.activations import MovedActivations
from headwater.plan.cluster.gradients import GradientsOut
from headwater.plan.cluster.host import HostResources
from headwater.plan.cluster.owners import Owners
from headwater.plan.cluster.timeline import Kind, Timeline
from headwater.plan.cluster.types import Machines
from headwater.plan.cluster.weights import WeightsIn
from headwater.plan.predict import USE_OVERHEAD_S, Predictor
from headwater.plan.types import Phase, Plan
from headwater.store.layout import MOST_UNFINISHED

UPDATES_AHEAD = 4
"""Updates and broadcasts may be at most this many uses ahead of the computation."""


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


def simulate_step(plan: Plan, predictor: Predictor, machines: Machines) -> Step:
    """Simulate one step.

    Args:
        plan: the plan of one rank, made for its part of the batch.
        predictor: the predictor of the plan's trace, with the rates of one rank.
        machines: the hosts and ranks of the run.

    Returns:
        The step.
    """
    timeline = Timeline()
    host = HostResources(timeline, machines)
    _Replay(plan, predictor, host).run()
    return Step(timeline, tuple(host.ranks), timeline.end_s)


@final
class _Replay:
    """Adds the tasks of a step to the resources of a host, in the order in which the engine starts them."""

    def __init__(self, plan: Plan, predictor: Predictor, host: HostResources) -> None:
        self._plan, self._footprint, self._host = plan, predictor.footprint, host
        self._owners = owners = Owners(plan, predictor, host)
        self._weights = WeightsIn(plan, predictor, host, owners)
        self._gradients = GradientsOut(plan, predictor.footprint, host, owners)
        self._updates: list[int] = []  # updates in backward, in order
        self._activations = MovedActivations(plan, host)
        self._seconds = predictor.stage_times.of(plan)
        self._read: list[list[int]] = [[] for _ in host.ranks]  # by rank: reads of the last use without slab

    def run(self) -> None:
        """Add every task of the step."""
        total = self._plan.num_micro_batches * len(self._plan.schedule)
        for use in range(total + UPDATES_AHEAD):
            if use < total:
                self._weights.supply(use)
            if use >= UPDATES_AHEAD:
                self._use(use - UPDATES_AHEAD)
        self._gradients.agree()

    def _use(self, use: int) -> None:
        """Add the tasks that compute one use on every rank, and send the gradients that it completes."""
        visits = self._plan.visits
        micro_batch, position = divmod(use, len(visits))
        place, phase = visits[position]
        stage, forward = self._plan.trace.uses[place], phase is Phase.FORWARD
        # A stage that is used twice is usually a tied embedding and head. Its time counts at the last use.
        # The seconds of a backward contain those of recomputing the forward.
        works = place == self._plan.trace.last_use[stage] and phase is not Phase.AGAIN
        whole = self._seconds[stage].forward if forward else self._seconds[stage].backward
        seconds = USE_OVERHEAD_S + (whole if works else 0.0)
        arrived = self._weights.take(use)
        tasks = []
        for rank, resource in enumerate(self._host.ranks):
            # Weights in place are read while the rank computes. Only the next use of the rank waits for this.
            after = [*arrived[rank], *self._read[rank]]
            if phase is Phase.BACKWARD:  # one stage may wait for its update while another one is computed
                after += self._updates[: -MOST_UNFINISHED - 1][-1:]
            self._read[rank] = self._read_in_place(stage, rank, arrived[rank]) if works else []
            if works and not forward:
                after += self._activations.bring_back(stage, rank)
            task = self._host.timeline.add(Kind.COMPUTE, phase.value, stage, seconds, (resource,), after)
            if works and forward:
                self._activations.move_out(stage, rank, task)
            tasks.append(task)
        self._weights.release(tasks)
        if phase is Phase.BACKWARD and place == self._plan.trace.first_use[stage]:
            summed = self._gradients.add(micro_batch, stage, tasks)
            if self._plan.updates == "in_backward" and micro_batch == self._plan.num_micro_batches - 1:
                self._update(stage, summed)

    def _update(self, stage: int, summed: list[int]) -> None:
        """Add the update of a stage whose gradients are complete, unless the device updates it."""
        if summed and stage not in self._plan.on_device:
            self._updates.append(self._owners.update(stage, summed))

    def _read_in_place(self, stage: int, rank: int, arrived: list[int]) -> list[int]:
        """Add the reads of weights in place. The ranks of a host share the rate of its memory."""
        if self._plan.device != "cpu" or not self._plan.trace.costs[stage].forward.flops:
            return []
        after = [*arrived, *self._weights.last_use(rank)]
        slab = self._footprint.stages[stage].slab
        return [self._host.use_memory(Kind.COMPUTE, "weights read", stage, slab, after)]
