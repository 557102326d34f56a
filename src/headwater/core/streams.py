"""Streams: queues of work that a device does in order, beside the thread that fills them.

[Note: order of copies]
A call that queues work returns before the work is done. So two pieces of work on the same memory need an
order: both are in one stream, or one stream waits for an event of the other, or a thread waits for the event
before it queues the second. Nothing else orders them. A test double of the device checks every copy.
"""

from __future__ import annotations

import abc
import functools
from typing import final

import torch


class Event(abc.ABC):
    """A point in the work of a stream. It is reached when all work queued before it is done."""

    @abc.abstractmethod
    def query(self) -> bool:
        """Return true if the event is reached."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Block the calling thread until the event is reached."""


class Stream(abc.ABC):
    """Interface: a queue of work. Any thread may call it."""

    @abc.abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy. The caller keeps both tensors alive, and unchanged by others, until it is done.

        Args:
            target: memory on the device, or page-locked host memory.
            source: the same, on the other side; with the shape, strides and dtype of `target`, and dense.
        """

    @abc.abstractmethod
    def wait(self, event: Event) -> None:
        """Delay all work that is queued later until `event`. The calling thread continues."""

    @abc.abstractmethod
    def record(self) -> Event:
        """Return the event that is reached when all work queued until now is done."""


@final
class Reached(Event):
    """An event of work that was done before the event was recorded."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


REACHED = Reached()


@final
class ImmediateStream(Stream):
    """The stream of a device that computes in host memory: all work is done before its call returns."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def wait(self, event: Event) -> None:
        event.synchronize()

    def record(self) -> Event:
        return REACHED


IMMEDIATE = ImmediateStream()


def current_stream_id(device: torch.device) -> int:
    """Return the identity of the stream on which the calling thread runs operators of a device.

    Operators of two streams have no order unless the program gives them one. A CPU has one stream, 0.
    """
    if device.type == "cpu" or device.type != _accelerator():
        return 0
    return torch.accelerator.current_stream(device).stream_id


@functools.cache
def _accelerator() -> str | None:
    """Return the type of this machine's accelerator, such as `cuda`; `None` without an accelerator."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type
