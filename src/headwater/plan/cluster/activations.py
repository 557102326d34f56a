"""Activations that are moved out after the forward of a stage, and back before its backward."""

from __future__ import annotations

from typing import final

from headwater.plan.cluster.host import HostResources
from headwater.plan.cluster.timeline import Kind
from headwater.plan.memory.activations import offloaded_bytes
from headwater.plan.types import Plan


@final
class MovedActivations:
    """Offloaded activations of every rank: on disk if ranks compute on CPU cores, else in host memory.

    Args:
        plan: the plan of one rank.
        host: the resources.
    """

    def __init__(self, plan: Plan, host: HostResources) -> None:
        self._plan, self._host = plan, host
        self._out: dict[tuple[int, int], int] = {}  # by stage and rank: the task that has moved them out

    def move_out(self, stage: int, rank: int, computed: int) -> None:
        """Add the task that moves the activations of a stage out, if the plan offloads them.

        Args:
            stage: index of the stage.
            rank: number of the rank on this host.
            computed: the task that has made them.
        """
        moved, host = self._bytes(stage), self._host
        if not moved:
            return
        if self._plan.device == "cpu":
            task = host.disk.write("activations", stage, moved, [computed], Kind.OFFLOAD)
        else:
            task = host.send(Kind.OFFLOAD, "activations", stage, moved, host.way_out(rank), [computed])
        self._out[stage, rank] = task

    def bring_back(self, stage: int, rank: int) -> list[int]:
        """Add a task that brings back a stage's activations, and return it in a list.

        The list is empty if the activations were not moved out.
        """
        if (stage, rank) not in self._out:
            return []
        moved, host, after = self._bytes(stage), self._host, [self._out.pop((stage, rank))]
        if self._plan.device == "cpu":
            return [host.disk.read("activations", stage, moved, after, Kind.OFFLOAD)]
        return [host.send(Kind.OFFLOAD, "activations", stage, moved, host.way_in(rank), after)]

    def _bytes(self, stage: int) -> int:
        return offloaded_bytes(self._plan.trace.costs[stage], self._plan.activations[stage])
