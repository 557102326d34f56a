"""The one place that knows how CPU and CUDA differ: memory, copies, and who waits for whom."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from headwater.core.buffers import aligned_empty
from headwater.core.errors import PlanError, StreamError
from headwater.core.units import format_bytes


class Device(abc.ABC):
    """A compute device.

    Attributes:
        torch_device: where slabs and batches go.
        reads_host: whether the device computes on host memory, so that weights need not be copied to it.
    """

    torch_device: torch.device
    reads_host: bool

    @abc.abstractmethod
    def allocate_slab(self, num_bytes: int) -> torch.Tensor:
        """Memory for one stage on the device, uint8."""

    @abc.abstractmethod
    def page_lock(self, memory: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Let copies from host memory to the device run by themselves, until what is returned is called."""

    @abc.abstractmethod
    def compute_mark(self) -> object:
        """A point in the compute thread's work; a copy that waits for it does not overtake that work."""

    @abc.abstractmethod
    @contextmanager
    def copying(self, after: object) -> Iterator[None]:
        """Surrounds the fetch thread's copies: they begin after `after`, and are done at the end."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait for everything the compute thread has asked for."""


class CpuDevice(Device):
    """Host memory is device memory; everything is done when the call returns."""

    torch_device = torch.device("cpu")
    reads_host = True

    def allocate_slab(self, num_bytes: int) -> torch.Tensor:
        return aligned_empty(num_bytes)

    def page_lock(self, memory: Sequence[torch.Tensor]) -> Callable[[], None]:
        return lambda: None

    def compute_mark(self) -> object:
        return None

    @contextmanager
    def copying(self, after: object) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        pass


class CudaDevice(Device):
    """The current CUDA device: slabs in its memory, filled on a stream of their own from host memory."""

    reads_host = False

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise PlanError("there is no CUDA device here", where="device", remedy="use device cpu")
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._copies = torch.cuda.Stream(self.torch_device)

    def allocate_slab(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self.torch_device)

    def page_lock(self, memory: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Unlike torch's page-locked memory, what is locked here is no more than there is, and may be shared.

        Raises:
            StreamError: if the system does not allow it.
        """
        cuda, locked = torch.cuda.cudart(), list[torch.Tensor]()

        def unlock() -> None:
            while locked:
                cuda.cudaHostUnregister(locked.pop().data_ptr())

        for each in memory:
            code = int(cuda.cudaHostRegister(each.data_ptr(), each.nbytes, 0))
            if code:
                unlock()
                raise StreamError(
                    f"{format_bytes(each.nbytes)} of host memory cannot be page-locked (CUDA error {code})",
                    remedy="free host memory, or write a smaller host_memory",
                )
            locked.append(each)
        return unlock

    def compute_mark(self) -> object:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    @contextmanager
    def copying(self, after: object) -> Iterator[None]:
        torch.cuda.set_device(self.torch_device)  # of this thread, which would touch the first one otherwise
        with torch.cuda.stream(self._copies):
            if isinstance(after, torch.cuda.Event):
                self._copies.wait_event(after)
            yield
            self._copies.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)


def make_device(name: str) -> Device:
    """The device called `cpu` or `cuda`."""
    if name == "cpu":
        return CpuDevice()
    if name == "cuda":
        return CudaDevice()
    raise PlanError(f"there is no device {name!r}", remedy="write cpu or cuda")
