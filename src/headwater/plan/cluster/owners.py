"""Owners of masters and optimizer state: they update their shares, and send all hosts the new weights."""

from __future__ import annotations

from collections.abc import Sequence

from headwater.core.errors import DoesNotFitError
from headwater.core.units import format_bytes
from headwater.plan.cluster.disk import DiskQueue
from headwater.plan.cluster.host import HostResources
from headwater.plan.cluster.timeline import Kind
from headwater.plan.cluster.types import Machines
from headwater.plan.footprint import Footprint
from headwater.plan.predict import Predictor
from headwater.plan.types import Plan, Tier


class Owners:
    """Adds the tasks of one host that owns masters and optimizer state: a compute host or a store host.

    Args:
        plan: the plan of one rank.
        predictor: the predictor of the plan's trace.
        host: the resources of a compute host.
    """

    def __init__(self, plan: Plan, predictor: Predictor, host: HostResources) -> None:
        timeline, machines = host.timeline, host.machines
        self._timeline, self._plan, self._predictor = timeline, plan, predictor
        self._machines, self._network = machines, host.network
        self._cores, self._memory = host.cores, host.memory
        # Sums of gradients wait on the disk of the compute host, even if other hosts have the masters.
        self._host_disk = self._disk = host.disk
        self._part = 1.0 / machines.owners
        self._slowness, tier = 1.0, plan.tier
        store = machines.cluster.store
        if store is not None:
            tier = store_tier(predictor.footprint, machines)
            self._cores = []
            self._memory = timeline.resource("store", "memory")
            self._disk = DiskQueue(timeline, "store", store.disk)
            self._slowness = predictor.adamw_params_per_s / store.memory.adamw_params_per_s
        in_memory = plan.in_memory if store is None else ()
        stages = range(len(plan.trace.stages)) if tier == "disk" else ()
        self._on_disk = frozenset(stages) - frozenset(in_memory)
        self._alone = host.network is None

    def needs_slab(self, stage: int) -> bool:
        """True if an update writes new weights to a slab, as host memory has no other place for them."""
        return self._alone and stage in self._on_disk and self._plan.updates == "on_fetch"

    def update(self, stage: int, after: Sequence[int]) -> int:
        """Add the tasks that update a stage and send it to every host; return the last task (-1: frozen)."""
        held = self._predictor.footprint.stages[stage]
        if not held.trained:
            return -1
        moved, before = self._part * held.state, list(after)
        if stage in self._plan.on_disk:
            moved += self._part * held.slab
        if self._plan.gradient_tier == "disk":
            waiting = self._predictor.footprint.gradients.held(self._plan, stage)
            before = [self._host_disk.read("gradients", stage, self._part * waiting, before)]
        if stage in self._on_disk:
            before = [self._disk.read("masters", stage, moved, before)]
        done = self._compute(stage, before)
        if stage in self._on_disk:
            self._disk.write("masters written", stage, moved, done)
        if self._network is None or self._machines.streams_from_store:
            return self._timeline.add(Kind.UPDATE, "updated", stage, 0.0, after=done)
        if stage not in self._plan.on_disk:
            return self._network.broadcast(stage, held.slab, done)
        read = self._host_disk.read("weights to send", stage, self._part * held.slab, done)
        arrived = self._network.broadcast(stage, held.slab, [read])
        others = (1 - self._part) * held.slab
        return self._host_disk.write("weights written", stage, others, [arrived])

    def _compute(self, stage: int, after: Sequence[int]) -> list[int]:
        """Add the tasks of the update. If cores compute, each rank updates its part of the host's share."""
        seconds = (
            self._part * self._slowness * self._predictor.update_s(self._predictor.footprint.stages[stage])
        )
        # Each part also occupies the host's memory. All ranks share its rate: more of them are not faster.
        held: list[tuple[int, ...]] = [(cores, self._memory) for cores in self._cores] or [(self._memory,)]
        return [
            self._timeline.add(Kind.UPDATE, "update", stage, seconds / len(held), resources, after)
            for resources in held
        ]

    def keep(self, stage: int, micro_batch: int, after: Sequence[int]) -> int:
        """Add the tasks that add a micro-batch's gradients to a stage's sums on disk; return the last one."""
        held, before = self._predictor.footprint.gradients.held(self._plan, stage), list(after)
        if micro_batch > 0:
            before = [self._host_disk.read("gradients", stage, held, before)]
        return self._host_disk.write("gradients written", stage, held, before)


def store_tier(footprint: Footprint, machines: Machines) -> Tier:
    """Return the tier, memory or disk, in which the hosts of the weight store keep masters and states.

    Args:
        footprint: the footprint of the whole model.
        machines: the machines of a cluster with a separate weight store.

    Raises:
        DoesNotFitError: if they fit neither in the memory nor on the disks of these hosts.
    """
    store = machines.cluster.store
    assert store is not None, "the cluster has a separate weight store"
    needed = sum(stage.stored for stage in footprint.stages) / store.count
    if needed <= store.memory.size_bytes:
        return "memory"
    if store.disk is not None and needed <= store.disk.size_bytes:
        return "disk"
    raise DoesNotFitError(
        f"each of {store.count} hosts of the weight store needs {format_bytes(needed)} of memory or disk",
        where=machines.cluster.name,
        remedy="give the store more hosts, memory or disk",
    )
