"""Compute devices: memory for weights, page-locking and copies, which differ between a CPU and a GPU.

`devices.make_device` makes these objects. Two other differences are elsewhere: autocast (`core.precision`),
and the library of matrix products on the CPU (`matmul`).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import final

import torch

from headwater.core.buffers import aligned_empty
from headwater.core.streams import IMMEDIATE, Stream


class Device(abc.ABC):
    """Interface: a compute device. See [Note: order of copies] in `core/streams.py`.

    Attributes:
        torch_device: the device of slabs and batches.
        product: the name of the product. Two devices of the same product compute equal bits.
        reads_host: true if the device computes on host memory, so that weights need not be copied.
        compute: the stream on which the calling thread computes.
    """

    torch_device: torch.device
    product: str
    reads_host: bool
    compute: Stream

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
    def new_stream(self) -> Stream:
        """Return a new stream for copies, which overlap with the computation."""

    @abc.abstractmethod
    def return_cached(self) -> None:
        """Return the cached memory of torch's allocator to the device, so that other plans can use it."""

    @abc.abstractmethod
    def enter_thread(self) -> None:
        """Make torch use this device in the calling thread. Called when a thread begins."""


@final
class CpuDevice(Device):
    """The CPU as compute device: its memory is host memory, and a call returns after its work is done."""

    torch_device = torch.device("cpu")
    product = "CPU"
    reads_host = True
    compute = IMMEDIATE

    def allocate_slab(self, num_bytes: int) -> torch.Tensor:
        return aligned_empty(num_bytes)

    def page_lock(self, memory: Sequence[torch.Tensor]) -> Callable[[], None]:
        return lambda: None

    def new_stream(self) -> Stream:
        return IMMEDIATE

    def return_cached(self) -> None:
        pass

    def enter_thread(self) -> None:
        pass
