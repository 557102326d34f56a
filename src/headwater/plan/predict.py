"""Prediction of a plan's peak bytes and of the seconds of a step, from the dry run and measured rates."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache

from headwater.core.units import GIB
from headwater.plan import first_forward
from headwater.plan.belady import fetched_positions, slab_policy, slab_positions
from headwater.plan.footprint import Footprint
from headwater.plan.memory.stages import StageBytes
from headwater.plan.rates import ADAMW_BYTES, Calibration
from headwater.plan.stage_times import StageSeconds, StageTimes, summed_bytes
from headwater.plan.types import Plan, Prediction

NOMINAL = Calibration(
    fp32_flops_per_s=200e9,
    bf16_flops_per_s=400e9,
    fp16_flops_per_s=200e9,
    fp32_saved_bytes_per_s=2 * GIB,
    bf16_saved_bytes_per_s=1 * GIB,
    fp16_saved_bytes_per_s=1 * GIB,
    memory_bytes_per_s=20 * GIB,
    adamw_params_per_s=1e9,
)
"""Rates of a small machine, by which plans are compared if no rates were measured."""

_NOMINAL_LINK, _NOMINAL_READ, _NOMINAL_WRITE = 12 * GIB, 2 * GIB, 1 * GIB  # bytes/s

USE_OVERHEAD_S = 1e-4
"""Time of hooks and bookkeeping for each use of a stage."""

_DEVICE_UPDATE_PASSES = 3.5
"""Bytes that the kernels of an update on a device read and write, for each byte that the update must move."""


@dataclasses.dataclass(frozen=True)
class Phases:
    """A quantity, split into a step's two phases: the first forward, which updates weights, and the rest."""

    first: float = 0.0
    rest: float = 0.0

    @property
    def total(self) -> float:
        return self.first + self.rest


class Predictor:
    """Predicts plans for one trace.

    Attributes:
        footprint: the bytes of the trace.
        stage_times: predicts the seconds of each stage.

    Args:
        footprint: the bytes of the trace.
        calibration: rates of the machine; `NOMINAL` ones if not given, for comparing plans.
    """

    def __init__(self, footprint: Footprint, calibration: Calibration | None = None) -> None:
        self.footprint = footprint
        self._rates = rates = calibration or NOMINAL
        self._link_bytes_per_s = rates.link_bytes_per_s or _NOMINAL_LINK
        self._read_bytes_per_s = rates.disk_read_bytes_per_s or _NOMINAL_READ
        self._host_bytes_per_s = rates.adamw_params_per_s * ADAMW_BYTES
        self._write_bytes_per_s = rates.disk_write_bytes_per_s or _NOMINAL_WRITE
        self.stage_times = StageTimes(footprint, rates)

    @property
    def adamw_params_per_s(self) -> float:
        """Number of parameters that are updated per second."""
        return self._rates.adamw_params_per_s

    def update_s(self, stage: StageBytes) -> float:
        """Return the seconds of the update of one stage; 0 if it is not trained."""
        return stage.moved / self._host_bytes_per_s

    def missed(self, plan: Plan) -> tuple[int, ...]:
        """Return the positions in a micro-batch's schedule at which a stage is fetched into a slab."""
        return _missed(plan.schedule, self.footprint.slab_sizes, plan.slabs, plan.read_in_place)

    def predict(self, plan: Plan) -> Prediction:
        """Return peak bytes and step time of `plan`, which was made from this predictor's trace."""
        memory = self.footprint.memory(plan)
        parts = self.step_parts(plan)
        return Prediction(
            device_bytes=sum(memory.device.values()),
            host_bytes=sum(memory.host.values()),
            disk_bytes=sum(memory.disk.values()),
            step_s=sum(parts.values()),
            host_parts=memory.host,
            step_parts=parts,
            device_parts=memory.device,
            disk_parts=memory.disk,
        )

    def step_parts(self, plan: Plan) -> dict[str, float]:
        """Return the seconds of one step by kind of work; `overlap` is negative, so that the sum is the step.

        The update of a stage and its fetch run before its first forward. So the first forward of a step and
        the rest of the step have different bottlenecks. Computation overlaps with transfers, except for the
        fetch of the first stage. Updates in backward overlap with the last backward instead. Beside a GPU the
        first forward is simulated, unless updates run in backward.
        """
        seconds = self.stage_times.of(plan)
        compute, copy = self._compute_s(plan, seconds), self._copy_s(plan)
        update = sum(map(self.update_s, self._updated(plan.on_device)))
        on_device = self._updates_on_device_s(plan)
        disk, link = self._disk_s(plan), self._link_s(plan)
        cores = Phases(compute.first + on_device, compute.rest)
        streams = Phases(max(disk.first, link.first), max(disk.rest, link.rest, self._sums_on_host_s(plan)))
        in_backward = plan.updates == "in_backward"
        if plan.device == "cpu":  # updates and copies use the cores that compute
            cores = Phases(compute.first + copy.first, compute.rest + copy.rest)
            cores = _add(cores, 0.0 if in_backward else update, update if in_backward else 0.0)
        elif in_backward:  # the updates run beside the last backward, and may end after it
            earlier = compute.rest - self._backward_s(seconds)
            streams = Phases(streams.first, max(streams.rest, earlier + update))
        if plan.device != "cpu" and not in_backward:
            first = max(self._first_forward_s(plan, seconds, disk.first), disk.first, link.first)
        else:
            sizes = self.footprint.slab_sizes
            fill = streams.first * sizes[self.footprint.trace.uses[0]] / sum(sizes)
            first = fill + max(cores.first, streams.first)
        step = first + max(cores.rest, streams.rest)
        totals = {"compute": compute, "copy": copy, "disk": disk, "link": link}
        updates = {"update": update} | ({"update on device": on_device} if plan.on_device else {})
        parts = updates | {name: phases.total for name, phases in totals.items()}
        return parts | {"overlap": step - sum(parts.values())}

    def _first_forward_s(self, plan: Plan, seconds: Sequence[StageSeconds], disk_s: float) -> float:
        """Return the seconds of a step's first forward on a GPU.

        Args:
            plan: the plan.
            seconds: the seconds of each stage.
            disk_s: seconds of its transfers from and to the disk.
        """
        trace, stages, on_device = self.footprint.trace, self.footprint.stages, set(plan.on_device)
        missed, times = set(self.missed(plan)), Counter(trace.uses)
        seen, uses = set[int](), list[first_forward.Use]()
        in_memory = {*plan.in_memory, *plan.on_device}
        on_disk = sum(held.slab for index, held in enumerate(stages) if index not in in_memory) or 1
        for position, stage in enumerate(trace.uses):
            held, is_first = stages[stage], stage not in seen
            seen.add(stage)
            compute_s = seconds[stage].forward / times[stage] + USE_OVERHEAD_S
            if stage in on_device:
                compute_s += self._update_on_device_s(held) if is_first else 0.0
                uses.append(first_forward.Use(compute_s))
                continue
            is_updated = is_first and held.trained
            copy_s = held.slab / self._link_bytes_per_s if is_updated or position in missed else None
            # The disk reads and writes beside the update, in proportion to the weights of a stage.
            transfer_s = disk_s * held.slab / on_disk if is_first and stage not in in_memory else 0.0
            # A copy to the GPU reads host memory, which limits updates too.
            read_s = 0.0 if copy_s is None else held.slab / self._host_bytes_per_s
            update_s = read_s + (self.update_s(held) if is_updated else 0.0)
            uses.append(first_forward.Use(compute_s, max(update_s, transfer_s), copy_s))
        return first_forward.forward_s(uses, plan.slabs)

    def _sums_on_host_s(self, plan: Plan) -> float:
        """Return the seconds in which the host of a GPU adds the gradients of all micro-batches."""
        count = plan.num_micro_batches
        if plan.device == "cpu" or self.footprint.gradients.sums_stay:  # see `StageTimes`
            return 0.0
        moved = sum(summed_bytes(stage, count) for stage in self._updated(plan.on_device))
        return count * moved / self._host_bytes_per_s

    def _updates_on_device_s(self, plan: Plan) -> float:
        """Return the seconds of the updates of the stages in device memory, on the computing stream."""
        return sum(self._update_on_device_s(self.footprint.stages[stage]) for stage in plan.on_device)

    def _update_on_device_s(self, stage: StageBytes) -> float:
        """Return the seconds of the update of one stage in device memory; 0 if it is not trained."""
        moved = 2 * (stage.slab + stage.state) + stage.gradient if stage.trained else 0
        return _DEVICE_UPDATE_PASSES * moved / self._rates.memory_bytes_per_s

    def _compute_s(self, plan: Plan, seconds: Sequence[StageSeconds]) -> Phases:
        """Return the seconds of forward and backward of all micro-batches."""
        overhead = USE_OVERHEAD_S * len(self.footprint.trace.uses)
        forward = overhead + sum(stage.forward for stage in seconds)
        backward = self._backward_s(seconds)
        return Phases(forward, plan.num_micro_batches * (forward + backward) - forward)

    def _backward_s(self, seconds: Sequence[StageSeconds]) -> float:
        """Return the seconds of the backward of one micro-batch."""
        if self.footprint.trace.inference:
            return 0.0
        overhead = USE_OVERHEAD_S * len(self.footprint.trace.uses)
        return overhead + sum(stage.backward for stage in seconds)

    def _copy_s(self, plan: Plan) -> Phases:
        """Return the seconds in which CPU cores copy weights to slabs; 0 on a GPU or with the disk tier."""
        if plan.device != "cpu" or plan.tier == "disk":
            return Phases()
        fetched, rate = self._fetched_bytes(plan, plan.read_in_place), self._rates.memory_bytes_per_s
        # Each byte counts twice, because a copy reads and writes it.
        return Phases(2 * fetched.first / rate, 2 * fetched.rest / rate)

    def _fetched_bytes(self, plan: Plan, left_out: Collection[int]) -> Phases:
        """Return the bytes of weights copied to slabs. After an update, a stage in a slab is copied again.

        Args:
            plan: the plan.
            left_out: stages that do not count.
        """
        schedule, stages = plan.schedule, self.footprint.stages
        first_uses = set(self.footprint.trace.first_use.values())
        missed = [position for position in self.missed(plan) if schedule[position] not in left_out]
        every = sum(stages[schedule[position]].slab for position in missed)
        first = [stages[schedule[position]] for position in missed if position in first_uses]
        frozen = sum(stage.slab for stage in first if not stage.trained)
        again = every - sum(stage.slab for stage in first)
        updated = sum(stage.slab for stage in self._updated(left_out))
        return Phases(updated + frozen, again + (plan.num_micro_batches - 1) * every)

    def _updated(self, left_out: Collection[int]) -> list[StageBytes]:
        """Return the trained stages, except for those that are left out."""
        stages = enumerate(self.footprint.stages)
        return [stage for index, stage in stages if stage.trained and index not in left_out]

    def _disk_s(self, plan: Plan) -> Phases:
        """Return the seconds of disk transfers. Reads and writes at the same time slow each other down."""
        read, write = Phases(), Phases()
        later = plan.num_micro_batches - 1
        if plan.tier == "disk":
            elsewhere = (*plan.in_memory, *plan.on_device)
            fetched, share = self._fetched_bytes(plan, elsewhere), self.footprint.share
            updated = self._updated(elsewhere)
            slabs, state = sum(stage.slab for stage in updated), sum(stage.state for stage in updated)
            # With `StoreShare.images`, an update reads a stage's weights, and the fetch reads them again.
            again = share.state * (state + (slabs if share.images else 0))
            written, in_backward = slabs + share.state * state, plan.updates == "in_backward"
            write = _add(write, *((0, written) if in_backward else (written, 0)))
            read = _add(read, *((0, again) if in_backward else (again, 0)))
            readers = self.footprint.disk_readers(plan)
            read = _add(read, readers * fetched.first, readers * fetched.rest)
        if plan.gradient_tier == "disk":
            held = self.footprint.gradients.all_held(plan)
            # Sums of several ranks are read again for their norms.
            measured = int(self.footprint.gradients.sums_stay)
            read = _add(read, held, (later + measured) * held)
            write = _add(write, 0, (1 + later) * held)
        if plan.device == "cpu":
            moved = self.footprint.offloaded_bytes(plan)
            read, write = _add(read, 0, (1 + later) * moved), _add(write, moved, later * moved)
        return Phases(
            read.first / self._read_bytes_per_s + write.first / self._write_bytes_per_s,
            read.rest / self._read_bytes_per_s + write.rest / self._write_bytes_per_s,
        )

    def _link_s(self, plan: Plan) -> Phases:
        """Return the seconds of transfers between host and device, which go both ways at once."""
        if plan.device == "cpu":
            return Phases()
        count, fetched = plan.num_micro_batches, self._fetched_bytes(plan, plan.on_device)
        moved = self.footprint.offloaded_bytes(plan)
        gradients = self.footprint.gradients
        leaving = count * sum(stage.gradient for stage in self._updated(gradients.staying(plan)))
        sums = sum(gradients.arriving_sums(plan))
        first = max(fetched.first + sums, moved)
        rest = max(fetched.rest + count * moved, leaving + (count - 1) * moved)
        return Phases(first / self._link_bytes_per_s, rest / self._link_bytes_per_s)


def _add(phases: Phases, first: float, rest: float) -> Phases:
    return Phases(phases.first + first, phases.rest + rest)


@lru_cache(maxsize=4096)
def _missed(
    schedule: tuple[int, ...], slab_sizes: tuple[int, ...], slabs: int, in_place: frozenset[int]
) -> tuple[int, ...]:
    positions = slab_positions(schedule, in_place)
    return tuple(
        positions[use] for use in fetched_positions(slab_policy(schedule, slab_sizes, slabs, in_place))
    )
