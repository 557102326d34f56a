"""The CUDA device: slabs in its memory, streams, events and page-locked host memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import final

import torch

from headwater.core.buffers import set_copied_by_fork
from headwater.core.device_memory import let_segments_grow
from headwater.core.errors import PlanError, StreamError
from headwater.core.gpu import first_use, why_missing
from headwater.core.streams import Event, Stream
from headwater.core.units import format_bytes
from headwater.stream.device import Device


@final
class CudaDevice(Device):
    """The current CUDA device.

    Raises:
        PlanError: if torch finds no CUDA device, or the driver refuses this process.
    """

    reads_host = False

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise PlanError(
                f"expected a GPU, but torch finds no CUDA device: {why_missing()}",
                where="device",
                remedy="use device cpu",
            )
        # cuBLAS reads this variable at its first use. With other workspaces the order of its sums may vary.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        let_segments_grow()
        with first_use():
            self.torch_device = torch.device("cuda", torch.cuda.current_device())
            self.product = torch.cuda.get_device_name(self.torch_device)
            torch.cuda.mem_get_info(self.torch_device)  # makes the context of this process on the GPU
        self.compute = CudaStream(self.torch_device, None)

    def allocate_slab(self, num_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.torch_device)
            raise PlanError(
                f"the plan needs {format_bytes(num_bytes)} more on the GPU, which has "
                f"{format_bytes(free)} of {format_bytes(total)} free now",
                where="device_memory",
                remedy="end other processes that use the GPU, or write a smaller device_memory",
            ) from error

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
                each = locked.pop()
                cuda.cudaHostUnregister(each.data_ptr())
                set_copied_by_fork(each, True)

        for each in memory:
            # A fork would copy locked pages at once: gigabytes for each worker of a data loader.
            set_copied_by_fork(each, False)
            code = int(cuda.cudaHostRegister(each.data_ptr(), each.nbytes, 0))
            if code:
                # Memory that was locked in earlier iterations must not stay locked.
                unlock()
                set_copied_by_fork(each, True)
                self._clear_error()
                raise StreamError(
                    f"{format_bytes(each.nbytes)} of host memory cannot be page-locked (CUDA error {code})",
                    remedy="free host memory, or write a smaller host_memory",
                )
            locked.append(each)
        return unlock

    def _clear_error(self) -> None:
        """Clear the error of the last CUDA call. Otherwise the next kernel would raise it."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device)

    def new_stream(self) -> Stream:
        return CudaStream(self.torch_device, torch.cuda.Stream(self.torch_device))

    def return_cached(self) -> None:
        with contextlib.suppress(RuntimeError):  # after a failure of the driver an engine must still close
            torch.accelerator.empty_cache()

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.torch_device)


@final
class CudaStream(Stream):
    """A CUDA stream.

    Args:
        device: the device.
        stream: the stream; `None` for the stream on which the calling thread computes at each use.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._own = stream

    @property
    def _stream(self) -> torch.cuda.Stream:
        # Looked up at each use: autograd's threads compute on the stream of the forward.
        return torch.cuda.current_stream(self._device) if self._own is None else self._own

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def wait(self, event: Event) -> None:
        if isinstance(event, CudaEvent):
            self._stream.wait_event(event.event)
        else:
            event.synchronize()

    def record(self) -> Event:
        # `blocking`: a thread that waits for the event sleeps. A busy wait would take a core from updates.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return CudaEvent(event)


@final
class CudaEvent(Event):
    """A CUDA event that was recorded.

    Attributes:
        event: torch's event.
    """

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def query(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()
