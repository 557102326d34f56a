"""Gradients on their way out: sums of the ranks of a host, and sums of all hosts."""

from __future__ import annotations

from typing import final

from headwater.plan.cluster.host import HostResources
from headwater.plan.cluster.owners import Owners
from headwater.plan.cluster.timeline import Kind
from headwater.plan.footprint import Footprint
from headwater.plan.types import Plan


@final
class GradientsOut:
    """Adds the tasks in which ranks add gradients to the host's sums in turns, and owners get the sums.

    Args:
        plan: the plan of one rank.
        footprint: the footprint of the plan's trace.
        host: the resources.
        owners: receive the sums.
    """

    def __init__(self, plan: Plan, footprint: Footprint, host: HostResources, owners: Owners) -> None:
        self._plan, self._footprint = plan, footprint
        self._host, self._owners = host, owners
        self._turn: dict[int, int] = {}  # by stage: the last addition to its gradients
        self._reduced: list[int] = []

    def add(self, micro_batch: int, stage: int, computed: list[int]) -> list[int]:
        """Add the tasks of a micro-batch: each rank adds its gradients, then the owners receive the sum.

        Returns the last of them; an empty list for a frozen stage.

        Args:
            micro_batch: its index.
            stage: index of the stage.
            computed: by rank, the task that has made the gradients.
        """
        held, network = self._footprint.stages[stage], self._host.network
        if not held.trained:
            return []
        last = micro_batch == self._plan.num_micro_batches - 1
        turns = [self._take_turn(micro_batch, stage, rank, task) for rank, task in enumerate(computed)]
        after = (
            [self._owners.keep(stage, micro_batch, turns)] if self._plan.gradient_tier == "disk" else turns
        )
        if network is not None and (last or self._host.machines.streams_from_store):
            after = [network.reduce(stage, held.gradient, after)]
        self._reduced += after if last else []
        return after

    def agree(self) -> None:
        """Add the task in which hosts exchange the norm of all gradients, after the last sum."""
        network = self._host.network
        if network is not None:
            self._host.timeline.add(Kind.REDUCE, "norm", -1, network.agreement_s, after=self._reduced)

    def _take_turn(self, micro_batch: int, stage: int, rank: int, computed: int) -> int:
        """Add the tasks in which one rank adds its gradients to the host's sums, after the previous rank."""
        host, held, done = self._host, self._footprint.stages[stage], computed
        if host.links_out:
            done = host.send(Kind.REDUCE, "gradients", stage, held.gradient, host.links_out[rank], [done])
        if len(host.ranks) > 1:
            first = micro_batch == 0 and rank == 0
            before = [self._turn[stage]] if stage in self._turn else []
            # The first gradients are only written, all others are added to a sum that is read too.
            moved = held.gradient + (1 if first else 2) * self._footprint.gradients.held(self._plan, stage)
            core = tuple(host.cores[rank : rank + 1])
            done = host.use_memory(Kind.REDUCE, "gradients added", stage, moved, [done, *before], core)
            self._turn[stage] = done
        return done
