"""Compute devices: how memory for weights, page-locking and copies to slabs differ between CPU and CUDA.

Three differences are elsewhere, because they do not concern the copies of weights: where activations are
offloaded (`storage.make_offload`), autocast (`core.precision`), and the library of matrix products on the CPU
(`matmul`). Gradients always go to host memory (`gradient_hooks`).
"""

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
        torch_device: the device of slabs and batches.
        reads_host: true if the device computes on host memory, so that weights need not be copied.
    """

    torch_device: torch.device
    reads_host: bool

    @abc.abstractmethod
    def allocate_slab(self, num_bytes: int) -> torch.Tensor:
        """Allocate memory for one slab on the device, as a uint8 tensor."""

    @abc.abstractmethod
    def page_lock(self, memory: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Page-lock host memory, so that copies to the device are asynchronous.

        Returns:
            A function that unlocks the memory.
        """

    @abc.abstractmethod
    def compute_mark(self) -> object:
        """Return a mark for `copying`: it is reached when the work queued by the compute thread is done."""

    @abc.abstractmethod
    @contextmanager
    def copying(self, after: object) -> Iterator[None]:
        """Enter a context in which the fetch thread copies. Copies start once the mark `after` is reached.

        All of them are complete at the end of the context.
        """


class CpuDevice(Device):
    """The CPU as compute device: its memory is host memory, and operations end before their call returns."""

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


class CudaDevice(Device):
    """The current CUDA device: slabs are in its memory, and are filled on a separate stream."""

    reads_host = False

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise PlanError("there is no CUDA device here", where="device", remedy="use device cpu")
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._copies = torch.cuda.Stream(self.torch_device)

    def allocate_slab(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self.torch_device)

    def page_lock(self, memory: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Page-lock existing memory, which may be shared between processes.

        torch's own page-locked memory is a new allocation, of a size rounded up, and cannot be shared.

        Returns:
            A function that unlocks the memory.

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
                # What was locked before must not stay locked.
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
        torch.cuda.set_device(self.torch_device)  # for this thread, which would use device 0 otherwise
        with torch.cuda.stream(self._copies):
            if isinstance(after, torch.cuda.Event):
                # The compute stream may still read the slab that is overwritten.
                self._copies.wait_event(after)
            yield
            # The compute stream does not wait for this one, so the copy must be complete now.
            self._copies.synchronize()


def make_device(name: str) -> Device:
    """Return the device called `cpu` or `cuda`.

    Raises:
        PlanError: for another name, or if torch finds no CUDA device.
    """
    if name == "cpu":
        return CpuDevice()
    if name == "cuda":
        return CudaDevice()
    raise PlanError(f"expected device cpu or cuda, got {name!r}", remedy="write cpu or cuda")
