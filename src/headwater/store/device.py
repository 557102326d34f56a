"""The device tier: stages in the memory of the compute device, which also updates them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, final

import torch

from headwater.core.buffers import aligned_empty, round_up
from headwater.core.errors import PlanError, StoreError
from headwater.core.streams import Stream
from headwater.core.units import format_bytes
from headwater.store.layout import Group, StageLayout
from headwater.store.tier import WHOLE, Pages, Tier, all_pages, no_pages

if TYPE_CHECKING:
    from headwater.store.gradients.port import Gradients

ARRIVAL_ALIGNMENT_BYTES = 256


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The parts of a compute device that a device tier uses.

    Attributes:
        allocate: returns memory on the device, given its bytes; uint8.
        compute: the stream on which the calling thread computes.
        new_stream: returns a stream for copies.
    """

    allocate: Callable[[int], torch.Tensor]
    compute: Stream
    new_stream: Callable[[], Stream]


@final
class Arrivals:
    """Device memory in which the summed gradients of several ranks arrive for the update of a stage.

    [Note: replicas]
    With several ranks on a host, each has a replica of every stage in device memory. The ranks add their
    gradients to sums in host memory or files, in the order of ranks, as they do for all other stages. Each
    rank then copies the sums of a stage to its device and updates its replica. All ranks run the same kernels
    on the same bits, so the replicas stay equal without an exchange of weights. A rank counts as updated when
    its copy of the sums is done: only then may a rank that is in the next step already change the sums.

    Args:
        memory: the device.
        num_bytes: size of the gradients of the largest stage; see `arriving_bytes`.
    """

    def __init__(self, memory: DeviceMemory, num_bytes: int) -> None:
        self._memory = memory
        self._buffer = memory.allocate(num_bytes)
        self._stream = memory.new_stream()
        self._used = memory.compute.record()
        self._lock = threading.Lock()  # threads may update two stages at the same time

    @contextmanager
    def received(self, gradients: Gradients) -> Iterator[Gradients]:
        """Enter a context with copies of gradients on the device. They are valid inside it."""
        compute = self._memory.compute
        with self._lock:
            # Wait for the previous update only, not for all queued work: copies overlap with the computation.
            self._stream.wait(self._used)
            copies, start = list[torch.Tensor | None](), 0
            for gradient in gradients:
                if gradient is None:
                    copies.append(None)
                    continue
                flat = self._buffer[start : start + gradient.nbytes].view(gradient.dtype)
                copies.append(flat.view(gradient.shape))
                self._stream.copy(flat, gradient.view(-1))
                start += round_up(gradient.nbytes, ARRIVAL_ALIGNMENT_BYTES)
            arrived = self._stream.record()
            compute.wait(arrived)
            arrived.synchronize()  # from here on other ranks may change the sums
            try:
                yield copies
            finally:
                self._used = compute.record()


def arriving_bytes(layout: StageLayout, sum_dtype: torch.dtype | None) -> int:
    """Return the bytes that `Arrivals` needs for the gradients of one stage.

    Args:
        layout: the layout of the stage.
        sum_dtype: see `ParamSpec.sum_dtype`.
    """
    params = (param for param in layout.stage.params if param.requires_grad)
    sizes = (param.numel * param.sum_dtype(sum_dtype).itemsize for param in params)
    return sum(round_up(size, ARRIVAL_ALIGNMENT_BYTES) for size in sizes)


@final
class DeviceStage:
    """One stage in device memory; see [Note: order on the device tier].

    [Note: order on the device tier]
    A stage is read and updated on the stream of the computation, so an update comes after the backward that
    used the old weights, and before the forward that uses the new ones. Other threads may update a stage too,
    for example to save it in a checkpoint. Such an update waits for the event of the commit, which comes
    after the backward and all changes of the gradients. The computation after it waits for the event of the
    update. The thread also blocks until its update is done, because the memory that it then frees, such as
    gradients, may be used again by the computation at once.

    Attributes:
        wire: the wire image, uint8.

    Args:
        layout: the layout of the stage.
        memory: the device. The calling thread must be the thread that computes.
        arrivals: receives gradients from host memory; `None` if they are on the device already.
    """

    def __init__(self, layout: StageLayout, memory: DeviceMemory, arrivals: Arrivals | None = None) -> None:
        self.wire = memory.allocate(layout.wire_bytes)
        self._rest = memory.allocate(layout.rest_bytes)
        self._compute = memory.compute
        self._changed = memory.compute.record()
        self._computing_thread = threading.get_ident()
        self._arrivals = arrivals

    def bytes_of(self, group: Group) -> torch.Tensor:
        """Return the bytes of a group on the device."""
        return self._rest[group.offset : group.offset + group.num_bytes]

    def await_change(self, stream: Stream) -> None:
        """Delay later work of a stream until the last change of the stage is done."""
        stream.wait(self._changed)

    def commit(self) -> None:
        """Delay later changes and copies until the work that the caller has queued until now is done."""
        self._changed = self._compute.record()

    def received(self, gradients: Gradients) -> AbstractContextManager[Gradients]:
        """Return a context with the gradients of an update on the device: those given, or copies of them."""
        return nullcontext(gradients) if self._arrivals is None else self._arrivals.received(gradients)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Enter a context in which the calling thread changes the stage by operators on the device."""
        self.await_change(self._compute)
        try:
            yield
        finally:  # also after an error: some of the changes may be queued already
            self._changed = self._compute.record()
        if threading.get_ident() != self._computing_thread:
            self._changed.synchronize()


@final
class DeviceTier(Tier):
    """The tier in device memory. Updates run on the device. All other callers use copies in host memory.

    Args:
        layouts: one per stage.
        memory: the device.
        arrivals_bytes: size of `Arrivals` if the gradients of several ranks are summed in host memory; 0 if
            gradients stay on the device.

    Raises:
        StoreError: if the device has no room for the stages.
    """

    writes_behind = False

    def __init__(
        self, layouts: Sequence[StageLayout], memory: DeviceMemory, *, arrivals_bytes: int = 0
    ) -> None:
        super().__init__(layouts)
        self._compute = memory.compute
        try:
            arrivals = Arrivals(memory, arrivals_bytes) if arrivals_bytes else None
            self._stages = [DeviceStage(layout, memory, arrivals) for layout in layouts]
        except (torch.OutOfMemoryError, PlanError) as error:
            needed = arrivals_bytes + sum(layout.wire_bytes + layout.rest_bytes for layout in layouts)
            raise StoreError(
                f"the device has no room for the {format_bytes(needed)} of stages that the plan stores there",
                remedy="another process may have taken memory since the plan was made: start again, or write "
                "a smaller device_memory or stages_on_device",
            ) from error
        self._copies = memory.new_stream()

    def is_here(self, stage: int) -> bool:
        return True

    def resident_wire(self, stage: int) -> None:
        return None

    def on_device(self, stage: int) -> DeviceStage:
        return self._stages[stage]

    def read_wire(self, stage: int, into: torch.Tensor, part: slice = WHOLE) -> None:
        self._copy(stage, into[part], self._stages[stage].wire[: into.numel()][part])

    def write_wire(self, stage: int, image: torch.Tensor, part: slice = WHOLE) -> None:
        self._copy(stage, self._stages[stage].wire[: image.numel()][part], image[part])

    def groups(
        self, stage: int, groups: Sequence[Group], *, read: Pages = all_pages, write: Pages = no_pages
    ) -> Iterator[tuple[Group, torch.Tensor]]:
        buffer = aligned_empty(max((group.num_bytes for group in groups), default=0))
        for group in groups:
            here, there = buffer[: group.num_bytes], self._stages[stage].bytes_of(group)
            for pages in read(group):
                self._copy(stage, here[pages], there[pages])
            yield group, here
            for pages in write(group):
                self._copy(stage, there[pages], here[pages])

    def _copy(self, stage: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between a stage and host memory, and block until that is done."""
        self._stages[stage].await_change(self._copies)
        # The computation may still read the stage, or write to its weights; a copy must have these values.
        self._copies.wait(self._compute.record())
        self._copies.copy(target, source)
        self._copies.record().synchronize()

    def settle(self) -> None:
        pass

    def close(self) -> None:
        self._stages = []
